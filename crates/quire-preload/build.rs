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
        // gcc may turn malloc + memset into calloc, and so on: not inside an allocator.
        .flag("-fno-builtin-malloc")
        .flag("-fvisibility=hidden")
        .flag("-fno-semantic-interposition")
        .define("MI_DEBUG", "0")
        .define("MI_BUILD_RELEASE", None)
        .define("NDEBUG", None)
        .opt_level(3)
        .warnings(false)
        .compile("quire_heap");

    // Lazy binding would resolve a symbol at its first call: in a handler thread, or in a child
    // between fork and exec while another thread holds the loader's lock.
    println!("cargo:rustc-cdylib-link-arg=-Wl,-z,now");
    // Handler threads run this code until the process ends: dlclose must not take it away.
    println!("cargo:rustc-cdylib-link-arg=-Wl,-z,nodelete");
    println!("cargo:rerun-if-changed=src/heap/heap.c");
}
