//! `quire setup`: lets the users of a group have a userfaultfd, for good.
//!
//! Owns the udev rule, by which the device is the group's after each start of the machine. The group itself is
//! made, filled and removed by the system's own tools.

use std::fs;
use std::os::unix::fs::{PermissionsExt as _, chown};
use std::path::Path;
use std::process::Command;

use anyhow::{Context as _, Result, bail};
use clap::Args;

use crate::print::print;
use crate::sys::uffd::DEVICE;

const EXAMPLES: &str = "\
Examples:
  sudo quire setup                    for the user who calls sudo
  sudo quire setup --user ci --user build
  sudo quire setup --remove

It makes the group, adds the users to it, writes a rule for udev, and gives the device to the group at once.
A user is in a new group from the next login on; until then: newgrp quire.";

/// The rule, for udev's own folder of what an administrator sets.
const RULE: &str = "/etc/udev/rules.d/60-quire.rules";
/// What the device is before, and for a group.
const MODE_ALONE: u32 = 0o600;
const MODE_SHARED: u32 = 0o660;

#[derive(Args, Debug)]
#[command(after_help = EXAMPLES)]
pub(crate) struct SetupArgs {
    /// A user who may have it [default: the one who calls sudo]
    #[arg(long, value_name = "USER")]
    pub user: Vec<String>,

    /// The group that the device is given to
    #[arg(long, value_name = "GROUP", default_value = "quire")]
    pub group: String,

    /// Undo it: the rule, the device's group, and the group
    #[arg(long, conflicts_with = "user")]
    pub remove: bool,
}

pub(crate) fn setup(args: &SetupArgs) -> Result<u8> {
    if !rustix::process::geteuid().is_root() {
        bail!("what is set up is the whole machine's: run it as root, sudo quire setup");
    }
    let is_name = |byte: u8| byte.is_ascii_alphanumeric() || b"-_.".contains(&byte);
    if args.group.is_empty() || !args.group.bytes().all(is_name) {
        bail!("{:?} is no name of a group", args.group);
    }
    let said = if args.remove { remove(&args.group)? } else { install(args)? };
    print(&said)?;
    Ok(0)
}

fn install(args: &SetupArgs) -> Result<String> {
    let group = &args.group;
    if !fs::exists(DEVICE).unwrap_or(false) {
        bail!(
            "there is no {DEVICE}: the kernel is older than Linux 6.1, or this is a container without it"
        );
    }
    let caller = std::env::var("SUDO_USER").ok().filter(|user| user != "root");
    let users = if args.user.is_empty() { caller.into_iter().collect() } else { args.user.clone() };
    if group_id(group).is_none() {
        system(&["groupadd", "--system", group])?;
    }
    for user in &users {
        system(&["gpasswd", "--add", user, group])?;
    }
    let id =
        group_id(group).with_context(|| format!("the group {group} was made and is not there"))?;
    let folder = Path::new(RULE).parent().context("the rule has a folder")?;
    fs::create_dir_all(folder).with_context(|| folder.display().to_string())?;
    fs::write(RULE, rule(group)).context(RULE)?;
    give_device(id, MODE_SHARED)?;
    let members = if users.is_empty() { "nobody yet".into() } else { users.join(", ") };
    Ok(format!(
        "{DEVICE} is the group {group}'s, now and after each start ({RULE}).\n\
         New in the group: {members}. A user is in it from the next login on; until then: newgrp {group}\n"
    ))
}

fn remove(group: &str) -> Result<String> {
    match fs::remove_file(RULE) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
            return Err(error).context(RULE);
        }
        _ => {}
    }
    if fs::exists(DEVICE).unwrap_or(false) {
        give_device(0, MODE_ALONE)?;
    }
    if group_id(group).is_some() {
        system(&["groupdel", group])?;
    }
    Ok(format!("{DEVICE} is root's alone, and the group {group} is gone.\n"))
}

fn rule(group: &str) -> String {
    format!(
        "# By quire setup: who is in the group may have a userfaultfd.\n\
         KERNEL==\"userfaultfd\", SUBSYSTEM==\"misc\", GROUP=\"{group}\", MODE=\"{MODE_SHARED:04o}\"\n"
    )
}

fn give_device(group: u32, mode: u32) -> Result<()> {
    chown(DEVICE, None, Some(group)).context(DEVICE)?;
    fs::set_permissions(DEVICE, fs::Permissions::from_mode(mode)).context(DEVICE)
}

/// The id of a group of this machine's own.
fn group_id(group: &str) -> Option<u32> {
    parse_group(&fs::read_to_string("/etc/group").ok()?, group)
}

fn parse_group(groups: &str, group: &str) -> Option<u32> {
    let fields = groups.lines().map(|line| line.split(':').collect::<Vec<_>>());
    fields.into_iter().find(|fields| fields.first() == Some(&group))?.get(2)?.parse().ok()
}

/// Runs one of the system's tools.
fn system(words: &[&str]) -> Result<()> {
    let ran = Command::new(words[0]).args(&words[1..]).output();
    let ran = ran.with_context(|| format!("cannot run {}", words.join(" ")))?;
    if !ran.status.success() {
        bail!("{}: {}", words.join(" "), String::from_utf8_lossy(&ran.stderr).trim_end());
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_rule_is_udevs() {
        let text = rule("kvm");
        let line = "KERNEL==\"userfaultfd\", SUBSYSTEM==\"misc\", GROUP=\"kvm\", MODE=\"0660\"\n";
        assert!(text.ends_with(line), "{text}");
    }

    #[test]
    fn a_group_is_found_by_its_whole_name() {
        let groups = "root:x:0:\nquires:x:7:\nquire:x:998:a,b\n";
        assert_eq!(parse_group(groups, "quire"), Some(998));
        assert_eq!(parse_group(groups, "qui"), None);
    }
}
