//! The program `quire`; see the library beside it.

fn main() -> std::process::ExitCode {
    quire_cli::main()
}
