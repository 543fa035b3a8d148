use super::*;

/// A folder that goes with the test.
struct Folder(PathBuf);

impl Folder {
    fn new() -> Folder {
        let name = format!("quire-cgroup-{:016x}", crate::supervisor::random());
        let path = std::env::temp_dir().join(name);
        fs::create_dir(&path).unwrap();
        Folder(path)
    }

    fn file(&self, name: &str, content: &str) {
        let path = self.0.join(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, content).unwrap();
    }

    fn read(&self, name: &str) -> String {
        fs::read_to_string(self.0.join(name)).unwrap()
    }

    /// A hierarchy of version 2 with us in `own`.
    fn hierarchy(&self, own: &str) -> Hierarchy {
        let own = if own.is_empty() { self.0.clone() } else { self.0.join(own) };
        Hierarchy { version: Version::V2, own, mount_point: self.0.clone() }
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

const V1_MOUNTS: &str = "\
31 23 0:28 / /sys/fs/cgroup rw,relatime - tmpfs tmpfs rw,mode=755
32 31 0:29 / /sys/fs/cgroup/cpu rw,relatime - cgroup cgroup rw,cpu
35 31 0:32 / /sys/fs/cgroup/memory rw,relatime shared:9 - cgroup cgroup rw,memory
41 31 0:38 / /sys/fs/cgroup/unified rw,relatime - cgroup2 cgroup2 rw
";

#[test]
fn the_memory_controller_is_found_where_it_is_mounted() {
    let own = "9:name=systemd:/\n4:memory:/a/b\n1:cpu:/c\n0::/d\n";
    let found = find_in(V1_MOUNTS, own).unwrap();
    assert_eq!(found.version, Version::V1);
    assert_eq!(found.own, Path::new("/sys/fs/cgroup/memory/a/b"));
    let found = find_in("30 1 0:26 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw", "0::/user/x\n");
    let expected = Hierarchy {
        version: Version::V2,
        own: "/sys/fs/cgroup/user/x".into(),
        mount_point: "/sys/fs/cgroup".into(),
    };
    assert_eq!(found, Some(expected));
}

#[test]
fn a_container_sees_its_part_of_the_hierarchy() {
    let mounts = r"7 1 0:32 /docker/abc /sys/fs/my\040memory ro - cgroup cgroup rw,memory";
    let found = find_in(mounts, "4:cpu,memory:/docker/abc/in\n").unwrap();
    assert_eq!(found.own, Path::new("/sys/fs/my memory/in"));
    assert_eq!(find_in(mounts, "4:memory:/elsewhere\n"), None, "our cgroup is not visible");
    assert_eq!(find_in("", "4:memory:/\n"), None);
}

#[test]
fn in_version_2_the_root_passes_the_controller_on() {
    let folder = Folder::new();
    folder.file("cgroup.controllers", "cpu memory pids\n");
    folder.file("cgroup.subtree_control", "");
    let (parent, leaf) = parent_in_v2(&folder.hierarchy(""), "quire-1-1", 1 << 30).unwrap();
    assert_eq!((parent, leaf), (folder.0.clone(), None));
    assert_eq!(folder.read("cgroup.subtree_control"), "+memory");
}

/// Version 2 refuses to pass controllers on from a cgroup with processes; a folder in place of the
/// file refuses as well.
fn own_that_refuses(folder: &Folder, procs: &str) {
    folder.file("own/cgroup.controllers", "memory\n");
    folder.file("own/cgroup.procs", procs);
    folder.file("own/cgroup.subtree_control/x", "");
}

#[test]
fn in_version_2_a_cgroup_with_others_in_it_gets_a_neighbour() {
    let folder = Folder::new();
    own_that_refuses(&folder, "1\n2\n");
    folder.file("own/memory.max", "max\n");
    folder.file("own/memory.high", "max\n");
    let hierarchy = folder.hierarchy("own");
    let (parent, leaf) = parent_in_v2(&hierarchy, "quire-1-1", 1 << 30).unwrap();
    assert_eq!((parent, leaf), (folder.0.clone(), None));
    // A limit of our own is not to be escaped from.
    folder.file("own/memory.max", "1048576\n");
    let error = parent_in_v2(&hierarchy, "quire-1-1", 1 << 30).unwrap_err().to_string();
    assert!(error.contains("has a limit of its own"), "{error}");
    folder.file("own/memory.max", "2147483648\n");
    assert!(parent_in_v2(&hierarchy, "quire-1-1", 1 << 30).is_ok());
}

#[test]
fn in_version_2_a_missing_controller_is_said() {
    let folder = Folder::new();
    folder.file("cgroup.controllers", "cpu\n");
    let error = parent_in_v2(&folder.hierarchy(""), "quire-1-1", 1).unwrap_err().to_string();
    assert!(error.contains("the memory controller is not enabled"), "{error}");
}

#[test]
fn alone_in_its_cgroup_the_supervisor_makes_room_or_goes_back() {
    let folder = Folder::new();
    own_that_refuses(&folder, &format!("{}\n", std::process::id()));
    // The leaf of a plain folder has no cgroup.procs to enter, so it is given up.
    let error = parent_in_v2(&folder.hierarchy("own"), "quire-1-1", 1 << 30).unwrap_err();
    assert!(format!("{error:#}").contains("quire-1-1-supervisor/cgroup.procs"), "{error:#}");
    assert!(!folder.0.join("own/quire-1-1-supervisor").exists());
}

#[test]
fn stale_cgroups_are_removed_and_living_ones_stay() {
    let folder = Folder::new();
    let own = std::process::id();
    let start = procfs::stat(own).unwrap().start_ticks;
    let living = format!("quire-{own}-{start}");
    let reused_pid = format!("quire-{own}-{}", start + 1);
    let names = [
        &living,
        &reused_pid,
        "quire-4194999-1",
        "quire-4194999-2/quire-4194999-3",
        "quire-4194999-4-supervisor",
        "quire-x-1",
        "other",
    ];
    for name in names {
        fs::create_dir_all(folder.0.join(name)).unwrap();
    }
    remove_stale(&folder.0);
    let mut left: Vec<_> = fs::read_dir(&folder.0)
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    left.sort();
    let mut expected = ["other".to_owned(), living, "quire-x-1".to_owned()];
    expected.sort();
    assert_eq!(left, expected);
}

#[test]
fn a_real_cgroup_limits_and_goes() {
    let Ok(hierarchy) = Hierarchy::find() else {
        eprintln!("no memory controller here: not tested");
        return;
    };
    let cgroup = match Cgroup::create(&hierarchy, 64 << 20) {
        Ok(cgroup) => cgroup,
        Err(error) => {
            eprintln!("no right to make a cgroup here: not tested: {error:#}");
            return;
        }
    };
    let folder = cgroup.folder.clone();
    assert_eq!(cgroup.limit_bytes(), Some((64 << 20) + ALLOWANCE_BYTES));
    let grown = |members, wanted_bytes| Growth { budget_bytes: 64 << 20, members, wanted_bytes };
    let mut follow = cgroup.limit_follower(64 << 20, true);
    for members in [1, 3, 16, 2] {
        follow(grown(members, 4 << 30));
    }
    let of_sixteen = (64 << 20) + ALLOWANCE_BYTES + 15 * MEMBER_BYTES;
    assert_eq!(cgroup.limit_bytes(), Some(of_sixteen));
    follow(grown(16, 20 << 30));
    assert_eq!(cgroup.limit_bytes(), Some(of_sixteen + (32 << 20)), "page tables of 16 GiB");
    // Where the budget is for the whole it alone counts, and is not lowered.
    let mut follow = cgroup.limit_follower(64 << 20, false);
    for budget_bytes in [128 << 20, 32 << 20] {
        follow(Growth { budget_bytes, ..grown(40, 20 << 30) });
    }
    assert_eq!(cgroup.limit_bytes(), Some((128 << 20) + ALLOWANCE_BYTES));
    assert!(
        cgroup.meter().usage().is_some_and(|usage| usage.bytes < 1 << 20),
        "no process is in it"
    );
    assert!(cgroup.procs().is_ok());
    assert_eq!(cgroup.oom_kills(), 0);
    drop(cgroup);
    assert!(!folder.exists());
    // It does no harm where the cgroup is gone.
    follow(grown(17, 0));
}

#[test]
fn what_the_kernel_can_drop_is_no_usage() {
    // As Linux 6.18 writes it in version 2, some lines of it.
    let v2 = "anon 41943040\nfile 31457280\nkernel 6291456\nkernel_stack 65536\npagetables 1048576\nshmem 10485760\n\
              inactive_anon 0\nactive_anon 52428800\ninactive_file 12582912\nactive_file 8388608\nunevictable 0\n\
              slab_reclaimable 2097152\nslab_unreclaimable 524288\nslab 2621440\n";
    let mib = |mib: u64| mib << 20;
    let found = in_memory(mib(76), v2, None);
    let expected =
        InMemory { bytes: mib(76 - 12 - 8 - 2), shared_bytes: mib(10), kernel_bytes: mib(6 - 2) };
    assert_eq!(found, expected);
    // In version 1 the cgroup's own come first, and then those with all below it; it has no word on the kernel's.
    let v1 = "cache 4096\nshmem 0\ninactive_file 4096\nactive_file 0\ntotal_cache 31457280\ntotal_shmem 10485760\n\
              total_inactive_file 12582912\ntotal_active_file 8388608\n";
    let found = in_memory(mib(76), v1, Some(mib(3)));
    let expected =
        InMemory { bytes: mib(76 - 12 - 8), shared_bytes: mib(10), kernel_bytes: mib(3) };
    assert_eq!(found, expected);
    assert_eq!(in_memory(0, v2, None).bytes, 0, "it was read before");
}
