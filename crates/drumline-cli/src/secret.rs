//! Makes the secret of a job on several hosts.

use std::{
    fs::OpenOptions,
    io::{ErrorKind, Write as _},
    os::unix::fs::OpenOptionsExt as _,
    path::Path,
};

use drumline::auth::Secret;

use crate::{Error, Result};

/// Writes a fresh secret to a new file that only this user can read.
pub(crate) fn write(path: &Path) -> Result<()> {
    let failed = |error: String| Error::Secret { path: path.into(), error };
    let secret = Secret::random().map_err(|error| failed(error.to_string()))?;
    let file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(path);
    let mut file = file.map_err(|error| {
        failed(match error.kind() {
            ErrorKind::AlreadyExists => {
                "it exists, and a job may use it: delete it, or write another file".to_owned()
            }
            _ => error.to_string(),
        })
    })?;
    file.write_all(secret.expose())
        .and_then(|()| file.write_all(b"\n"))
        .map_err(|error| failed(error.to_string()))
}

#[cfg(test)]
mod tests {
    use std::{fs, os::unix::fs::MetadataExt as _};

    use super::*;

    #[test]
    fn a_new_secret_is_for_its_user_only_and_never_replaces_another() {
        let directory = tempfile::tempdir().unwrap();
        let [one, other] = ["one", "other"].map(|name| directory.path().join(name));
        write(&one).unwrap();
        write(&other).unwrap();
        let secret = Secret::from_file(&one).unwrap();
        assert_eq!(fs::metadata(&one).unwrap().mode() & 0o777, 0o600);
        assert_ne!(secret, Secret::from_file(&other).unwrap());
        let error = write(&one).unwrap_err().to_string();
        assert!(error.contains("it exists"), "{error}");
        assert_eq!(Secret::from_file(&one).unwrap(), secret);
        assert!(write(&directory.path().join("no/such/file")).is_err());
    }
}
