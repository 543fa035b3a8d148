//! The files that the AWS tools keep credentials and settings in.

use std::env::var_os;
use std::path::{Path, PathBuf};

use ini::Ini;

/// The settings of the profile that the environment names.
pub(crate) struct Profile {
    credentials: Option<Ini>,
    config: Option<Ini>,
    name: String,
}

impl Profile {
    /// # Errors
    /// That a file that is there cannot be read, as text.
    pub fn read() -> Result<Profile, String> {
        let name = var_os("AWS_PROFILE").filter(|name| !name.is_empty());
        let name =
            name.map_or_else(|| "default".into(), |name| name.to_string_lossy().into_owned());
        let credentials = load(&file("AWS_SHARED_CREDENTIALS_FILE", "credentials"))?;
        let config = load(&file("AWS_CONFIG_FILE", "config"))?;
        Ok(Profile { credentials, config, name })
    }

    /// A setting of the profile; the file of credentials comes first.
    pub fn get(&self, setting: &str) -> Option<&str> {
        let of_credentials =
            self.credentials.as_ref().and_then(|ini| ini.section(Some(&self.name)));
        // There the default profile is the only one without that word.
        let section = format!("profile {}", self.name);
        let of_config = self
            .config
            .as_ref()
            .and_then(|ini| ini.section(Some(section)).or_else(|| ini.section(Some(&self.name))));
        [of_credentials, of_config].into_iter().flatten().find_map(|section| section.get(setting))
    }
}

fn file(variable: &str, name: &str) -> PathBuf {
    let of_home = || {
        let home = var_os("HOME").map(PathBuf::from).unwrap_or_default();
        home.join(".aws").join(name)
    };
    var_os(variable).map_or_else(of_home, PathBuf::from)
}

fn load(path: &Path) -> Result<Option<Ini>, String> {
    match Ini::load_from_file_noescape(path) {
        Ok(ini) => Ok(Some(ini)),
        Err(ini::Error::Io(error)) if error.kind() == std::io::ErrorKind::NotFound => Ok(None),
        // Without what it says of the text, which may be a secret.
        Err(ini::Error::Parse(error)) => Err(format!(
            "line {} of {} is no setting; correct it, or name another file",
            error.line + 1,
            path.display()
        )),
        Err(ini::Error::Io(error)) => Err(format!(
            "{} cannot be read: {error}; let it be read, or name another file",
            path.display()
        )),
    }
}
