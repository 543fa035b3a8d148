//! Whether this process is in a container, whose, and which flag gives it a userfaultfd.
//!
//! The usual seccomp profiles forbid the system call, and let the ioctl on `/dev/userfaultfd` through: what is
//! needed is the device.

use std::fmt;
use std::fs;
use std::path::Path;

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Container {
    Docker,
    Podman {
        is_rootless: bool,
    },
    Kubernetes,
    /// One that says no more than that it is one.
    Other,
}

impl fmt::Display for Container {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Container::Docker => "a Docker container",
            Container::Podman { is_rootless: true } => "a rootless Podman container",
            Container::Podman { is_rootless: false } => "a Podman container",
            Container::Kubernetes => "a Kubernetes pod",
            Container::Other => "a container",
        })
    }
}

impl Container {
    pub(crate) fn find() -> Option<Container> {
        let is_in_a_pod = std::env::var_os("KUBERNETES_SERVICE_HOST").is_some();
        Container::find_below(Path::new("/"), is_in_a_pod)
    }

    /// By what runtimes leave in the root that they make.
    fn find_below(root: &Path, is_in_a_pod: bool) -> Option<Container> {
        let has = |name: &str| root.join(name).exists();
        let read = |name: &str| fs::read_to_string(root.join(name)).unwrap_or_default();
        if is_in_a_pod || has("run/secrets/kubernetes.io") {
            return Some(Container::Kubernetes);
        }
        if has("run/.containerenv") {
            // The file says so in privileged containers only: in others it is empty.
            let says_so = read("run/.containerenv").lines().any(|line| line == "rootless=1");
            let is_rootless = says_so || root_is_another(&read("proc/self/uid_map"));
            return Some(Container::Podman { is_rootless });
        }
        if has(".dockerenv") {
            return Some(Container::Docker);
        }
        // systemd writes there what it was told of a container of any kind.
        has("run/systemd/container").then_some(Container::Other)
    }

    /// How it is to be started so that the device is there and can be opened.
    pub(crate) const fn with_device(self) -> &'static str {
        match self {
            Container::Docker => "docker run --device /dev/userfaultfd ...",
            Container::Podman { is_rootless: false } => "podman run --device /dev/userfaultfd ...",
            // A group of the user's on the host may open it there; crun passes such groups on.
            Container::Podman { is_rootless: true } => {
                "podman run --device /dev/userfaultfd --group-add keep-groups ..., with crun; and on the host, once, \
                 sudo quire setup"
            }
            Container::Kubernetes => {
                "give the pod the node's device /dev/userfaultfd, by a device plugin's resource or by CDI"
            }
            Container::Other => "start it with the host's device /dev/userfaultfd",
        }
    }
}

/// Whether user 0 is another one on the host, by a map of users: inside, outside, how many.
fn root_is_another(uid_map: &str) -> bool {
    let fields = uid_map.lines().map(|line| line.split_whitespace().collect::<Vec<_>>());
    fields.into_iter().any(|fields| matches!(fields[..], ["0", outside, _] if outside != "0"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(files: &[(&str, &str)]) -> Option<Container> {
        let root = tempfile::tempdir().unwrap();
        for (name, text) in files {
            let path = root.path().join(name);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        }
        Container::find_below(root.path(), false)
    }

    #[test]
    fn a_container_is_known_by_what_its_runtime_leaves_there() {
        assert_eq!(found(&[("etc/hostname", "host")]), None);
        assert_eq!(found(&[(".dockerenv", "")]), Some(Container::Docker));
        // As Podman 4.3 writes it.
        let rootless = "engine=\"podman-4.3.1\"\nname=\"x\"\nrootless=1\ngraphRootMounted=1\n";
        let podman = |is_rootless| Some(Container::Podman { is_rootless });
        assert_eq!(found(&[("run/.containerenv", rootless)]), podman(true));
        let with_users = |map| found(&[("run/.containerenv", ""), ("proc/self/uid_map", map)]);
        assert_eq!(
            with_users("         0       1001          1\n         1     100000      65536\n"),
            podman(true)
        );
        assert_eq!(with_users("         0          0 4294967295\n"), podman(false));
        assert_eq!(found(&[("run/.containerenv", "")]), podman(false));
        let pod = [(".dockerenv", ""), ("run/secrets/kubernetes.io/serviceaccount/token", "x")];
        assert_eq!(found(&pod), Some(Container::Kubernetes));
        assert_eq!(found(&[("run/systemd/container", "lxc")]), Some(Container::Other));
        let root = tempfile::tempdir().unwrap();
        assert_eq!(Container::find_below(root.path(), true), Some(Container::Kubernetes));
    }
}
