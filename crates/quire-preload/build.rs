//! Compiles the heap's C side (mimalloc with this library's own memory calls) and sets how the
//! preload library is linked.

use std::env;
use std::path::Path;

fn main() {
    let include = env::var("DEP_MIMALLOC_INCLUDE_DIR").expect("libmimalloc-sys tells its headers");
    let root = Path::new(&include).parent().expect("the headers lie beside the source");

    cc::Build::new()
        .file("src/heap/heap.c")
        .include(&include)
        .include(root.join("src"))
        // The library is loaded at start-up, so its thread-locals have a fixed place; the general
        // model would call __tls_get_addr, which may allocate.
        .flag("-ftls-model=initial-exec")
        // gcc would turn malloc and memset into calloc, which must not be inside an allocator.
        .flag("-fno-builtin-malloc")
        .flag("-fvisibility=hidden")
        .flag("-fno-semantic-interposition")
        .define("MI_DEBUG", "0")
        .define("MI_BUILD_RELEASE", None)
        .define("NDEBUG", None)
        .opt_level(3)
        .warnings(false)
        .compile("quire_heap");

    link_unwinder();
    // Lazy binding would resolve a symbol at its first call: in a handler thread, or in a child
    // between fork and exec while another thread holds the loader's lock.
    println!("cargo:rustc-cdylib-link-arg=-Wl,-z,now");
    // Handler threads run this code until the process ends: dlclose must not take it away.
    println!("cargo:rustc-cdylib-link-arg=-Wl,-z,nodelete");
    println!("cargo:rerun-if-changed=src/heap/heap.c");
}

/// Links the compiler's unwinder, which `std` needs for its messages, from its archive. As a shared
/// library it would be loaded at the start of every program, and would ask the processor what it can
/// do, which takes long in a virtual machine. Where there is no archive the library is linked.
fn link_unwinder() {
    const NAME: &str = "libgcc_eh.a";
    let compiler = cc::Build::new().get_compiler();
    let asked = compiler.to_command().arg(format!("-print-file-name={NAME}")).output();
    let Ok(answer) = asked.map(|output| String::from_utf8_lossy(&output.stdout).into_owned())
    else {
        return;
    };
    // The answer is the bare name where the compiler does not have the file.
    if let Some(folder) = Path::new(answer.trim()).parent().filter(|folder| folder.is_dir()) {
        println!("cargo:rerun-if-changed={}", answer.trim());
        println!("cargo:rustc-link-search=native={}", folder.display());
        println!("cargo:rustc-link-lib=static:-bundle=gcc_eh");
    }
}
