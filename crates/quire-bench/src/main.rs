//! `quire-bench`: the program that `quire bench` runs.

fn main() -> std::process::ExitCode {
    quire_bench::main()
}
