//! What is made from the command line's definition when quire is installed: man pages, and completions for
//! shells.

use std::fs::{self, File};
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result};
use clap::{Args, CommandFactory as _};
use clap_complete::Shell;

use crate::cli::Arguments;

#[derive(Args, Debug)]
pub(crate) struct GenerateArgs {
    /// The folder `share` of the place where quire is installed
    #[arg(value_name = "SHARE")]
    pub share: PathBuf,
}

/// Where a shell looks for completions, below `share`.
const COMPLETIONS: [(Shell, &str, &str); 3] = [
    (Shell::Bash, "bash-completion/completions", "quire"),
    (Shell::Zsh, "zsh/site-functions", "_quire"),
    (Shell::Fish, "fish/vendor_completions.d", "quire.fish"),
];

/// Writes all of them.
pub(crate) fn generate(args: &GenerateArgs) -> Result<u8> {
    let pages = folder(&args.share, "man/man1")?;
    let written = clap_mangen::generate_to(Arguments::command(), &pages);
    written.with_context(|| format!("{}", pages.display()))?;
    for (shell, place, name) in COMPLETIONS {
        let path = folder(&args.share, place)?.join(name);
        let mut file = File::create(&path).with_context(|| format!("{}", path.display()))?;
        clap_complete::generate(shell, &mut Arguments::command(), "quire", &mut file);
    }
    Ok(0)
}

fn folder(share: &Path, place: &str) -> Result<PathBuf> {
    let folder = share.join(place);
    fs::create_dir_all(&folder).with_context(|| format!("{}", folder.display()))?;
    Ok(folder)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_command_has_a_page_with_its_options_and_every_shell_completes_it() {
        let share = tempfile::tempdir().unwrap();
        generate(&GenerateArgs { share: share.path().into() }).unwrap();
        let read = |name: &str| fs::read_to_string(share.path().join(name)).unwrap();
        let command = Arguments::command();
        for one in command.get_subcommands().filter(|one| !one.is_hide_set()) {
            let page = read(&format!("man/man1/quire-{}.1", one.get_name()));
            for long in one.get_arguments().filter_map(|argument| argument.get_long()) {
                // Hyphens are escaped there.
                let option = format!("--{long}").replace('-', "\\-");
                assert!(page.contains(&option), "{option} in {}", one.get_name());
            }
        }
        assert!(read("man/man1/quire.1").contains("quire doctor"), "the examples are there");
        for (_, place, name) in COMPLETIONS {
            assert!(read(&format!("{place}/{name}")).contains("fault-around"), "{name}");
        }
    }
}
