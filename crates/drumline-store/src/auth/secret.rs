use std::{
    ffi::OsString,
    fmt,
    io::Read as _,
    os::unix::{ffi::OsStringExt as _, fs::PermissionsExt as _},
    path::Path,
    sync::Arc,
};

use drumline_shm::files::open_to_read;
use hmac_sha256::HMAC;
use zeroize::{Zeroize as _, Zeroizing};

use crate::{Error, Result, launched::is_of_inner_job};

/// The secret of a job: all of its processes know it, and no other process does.
///
/// It is never printed. Its memory is overwritten when the last clone is dropped; clones share it.
///
/// ```
/// # use drumline_store as drumline;
/// use drumline::auth::Secret;
///
/// let secret = Secret::new(*b"forty-two is not very secret")?;
/// assert_eq!(format!("{secret:?}"), "Secret(..)");
/// assert!(Secret::new(*b"too short").is_err());
/// # Ok::<_, drumline::Error>(())
/// ```
#[derive(Clone)]
pub struct Secret(Arc<Zeroizing<Vec<u8>>>);

const VARIABLE: &str = "DRUMLINE_SECRET";
const FILE_VARIABLE: &str = "DRUMLINE_SECRET_FILE";

impl Secret {
    /// The least length. A shorter secret could be guessed.
    pub const BYTES_MIN: usize = 16;
    /// The greatest length. A longer secret is a mistake, perhaps a wrong file.
    pub const BYTES_MAX: usize = 4096;

    /// A secret of these bytes.
    ///
    /// # Errors
    ///
    /// [`Setting`](drumline_error::ErrorKind::Setting) unless the length is from [`Secret::BYTES_MIN`] to
    /// [`Secret::BYTES_MAX`].
    pub fn new(bytes: impl Into<Vec<u8>>) -> Result<Secret> {
        Secret::named("the secret", bytes.into())
    }

    /// A fresh secret: 32 random bytes from the system, as 64 hexadecimal digits.
    ///
    /// # Errors
    ///
    /// [`Io`](drumline_error::ErrorKind::Io) if the system gives no random bytes.
    pub fn random() -> Result<Secret> {
        let bytes = Zeroizing::new(super::nonce::random_bytes()?);
        let digit = |nibble: u8| char::from_digit(nibble.into(), 16).unwrap_or_default() as u8;
        let text = bytes.iter().flat_map(|byte| [digit(byte >> 4), digit(byte & 15)]).collect();
        Ok(Secret(Arc::new(Zeroizing::new(text))))
    }

    /// The secret in a file, without the end of the last line.
    ///
    /// # Errors
    ///
    /// [`Setting`](drumline_error::ErrorKind::Setting) if the file cannot be read, if every user of this machine can
    /// read it, or if it is too short or too long.
    pub fn from_file(path: impl AsRef<Path>) -> Result<Secret> {
        let path = path.as_ref();
        let setting = format!("{FILE_VARIABLE} ({})", path.display());
        let read = || -> std::io::Result<(u32, Vec<u8>)> {
            let (file, about) = open_to_read(path)?;
            let mode = about.permissions().mode();
            // The buffer has its full size from the start. If it grew, the old buffer would stay in memory.
            let mut bytes = Vec::with_capacity(Secret::BYTES_MAX + 3);
            file.take(Secret::BYTES_MAX as u64 + 3).read_to_end(&mut bytes)?;
            Ok((mode, bytes))
        };
        let (mode, mut bytes) = read().map_err(|error| {
            let hint = match path.starts_with("/proc/self/fd") {
                true => {
                    "; a program between `drumline run` and this one has closed the descriptor: \
                     let it pass descriptors on (in Python: close_fds=False), or set \
                     DRUMLINE_SECRET before `drumline run`"
                }
                false => "",
            };
            invalid(&setting, format!("cannot be read: {error}{hint}"))
        })?;
        if mode & 0o007 != 0 {
            bytes.zeroize();
            let problem = format!(
                "every user of this machine may open it (mode {:03o}): chmod 600 it, and make a \
                 new secret if it may have been read",
                mode & 0o777
            );
            return Err(invalid(&setting, problem));
        }
        if bytes.last() == Some(&b'\n') {
            bytes.pop();
            if bytes.last() == Some(&b'\r') {
                bytes.pop();
            }
        }
        Secret::named(&setting, bytes)
    }

    /// The secret of the environment: the text of `DRUMLINE_SECRET`, or the content of the file
    /// that `DRUMLINE_SECRET_FILE` names; `None` if neither is set.
    ///
    /// # Errors
    ///
    /// [`Setting`](drumline_error::ErrorKind::Setting) if both are set, or as [`Secret::from_file`].
    pub fn from_env() -> Result<Option<Secret>> {
        Secret::from_variables(|name| std::env::var_os(name))
    }

    pub(crate) fn from_variables(
        variable: impl Fn(&str) -> Option<OsString>,
    ) -> Result<Option<Secret>> {
        match (variable(VARIABLE), variable(FILE_VARIABLE)) {
            (None, None) => Ok(None),
            (Some(text), None) => Secret::named(VARIABLE, text.into_vec()).map(Some),
            // A descriptor of a rank of the outer job.
            (None, Some(path)) if is_descriptor(&path) && is_of_inner_job(text_of(&variable)) => {
                Ok(None)
            }
            (None, Some(path)) => Secret::from_file(Path::new(&path)).map(Some),
            (Some(text), Some(_)) => {
                text.into_vec().zeroize();
                let both = format!("{VARIABLE}, {FILE_VARIABLE}");
                Err(invalid(&both, "both are set; which one is meant?".to_owned()))
            }
        }
    }

    fn named(setting: &str, bytes: Vec<u8>) -> Result<Secret> {
        let bytes = Zeroizing::new(bytes);
        if (Secret::BYTES_MIN..=Secret::BYTES_MAX).contains(&bytes.len()) {
            return Ok(Secret(Arc::new(bytes)));
        }
        let problem = format!(
            "a secret of {} bytes; it takes {} to {} (`openssl rand -hex 32` makes a good one)",
            bytes.len(),
            Secret::BYTES_MIN,
            Secret::BYTES_MAX
        );
        Err(invalid(setting, problem))
    }

    /// The bytes of the secret. Use them only to hand the secret to a process of the job.
    pub fn expose(&self) -> &[u8] {
        &self.0
    }

    /// A tag for `text` that only this secret makes: HMAC-SHA-256. A tag for one `purpose` is none for another, and no
    /// proof in a handshake.
    pub fn sign(&self, purpose: &str, text: &[u8]) -> [u8; Secret::TAG_BYTES] {
        self.mac_of(purpose, text).finalize()
    }

    /// Whether this secret has made `tag` for `text`. Takes the same time for every wrong tag of this length.
    pub fn has_signed(&self, purpose: &str, text: &[u8], tag: &[u8]) -> bool {
        tag.try_into().is_ok_and(|tag| self.mac_of(purpose, text).finalize_verify(tag))
    }

    /// The length of a tag.
    pub const TAG_BYTES: usize = 32;

    fn mac_of(&self, purpose: &str, text: &[u8]) -> HMAC {
        let length = (purpose.len() as u64).to_le_bytes();
        self.mac(&[b"drumline signed text", &length, purpose.as_bytes(), text])
    }

    /// HMAC-SHA-256 of these parts, with this secret as its key.
    pub(super) fn mac(&self, parts: &[&[u8]]) -> HMAC {
        let mut mac = HMAC::new(self.expose());
        parts.iter().for_each(|part| mac.update(part));
        mac
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Secret(..)")
    }
}

/// Takes constant time: it compares what the two secrets sign.
impl PartialEq for Secret {
    fn eq(&self, other: &Secret) -> bool {
        let tag = self.mac(&[b"equal"]).finalize();
        other.mac(&[b"equal"]).finalize_verify(&tag)
    }
}

impl Eq for Secret {}

fn is_descriptor(path: &OsString) -> bool {
    Path::new(path).starts_with("/proc/self/fd")
}

fn text_of(variable: &impl Fn(&str) -> Option<OsString>) -> impl Fn(&str) -> Option<String> {
    |name| variable(name)?.into_string().ok()
}

fn invalid(setting: &str, problem: String) -> Error {
    Error::setting(setting, problem)
}

#[cfg(test)]
mod tests {
    use std::{fs, os::unix::fs::PermissionsExt};

    use rustix::fs::{CWD, FileType, Mode, mknodat};

    use super::*;

    const TEXT: &str = "0123456789abcdef-swordfish";

    fn file(content: &[u8], mode: u32) -> (tempfile::TempDir, String) {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("secret");
        fs::write(&path, content).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(mode)).unwrap();
        let path = path.to_str().unwrap().to_owned();
        (directory, path)
    }

    fn from(pairs: &[(&str, &str)]) -> Result<Option<Secret>> {
        Secret::from_variables(|name| {
            pairs.iter().find(|pair| pair.0 == name).map(|pair| pair.1.into())
        })
    }

    #[test]
    fn the_environment_and_a_file_give_the_same_secret() {
        let (_directory, path) = file(format!("{TEXT}\n").as_bytes(), 0o600);
        let by_file = from(&[("DRUMLINE_SECRET_FILE", &path)]).unwrap().unwrap();
        let by_text = from(&[("DRUMLINE_SECRET", TEXT)]).unwrap().unwrap();
        assert_eq!(by_file, by_text);
        assert_ne!(by_text, Secret::random().unwrap());
        assert_eq!(from(&[]).unwrap(), None);
        let job = [("DRUMLINE_GIVEN", "TORCHELASTIC_RUN_ID=a"), ("TORCHELASTIC_RUN_ID", "b")];
        let in_inner_job = |path| from(&[job[0], job[1], ("DRUMLINE_SECRET_FILE", path)]).unwrap();
        assert_eq!(in_inner_job("/proc/self/fd/9999"), None, "that of the outer job");
        assert_eq!(in_inner_job(&path), Some(by_file));
    }

    #[test]
    fn fresh_secrets_differ() {
        let (a, b) = (Secret::random().unwrap(), Secret::random().unwrap());
        assert_ne!(a, b);
        assert_eq!(a.expose().len(), 64);
        assert!(a.expose().iter().all(u8::is_ascii_hexdigit));
    }

    #[test]
    fn what_is_no_secret_is_refused_and_never_shown() {
        let (_directory, open) = file(TEXT.as_bytes(), 0o644);
        let (_directory, short) = file(b"swordfish\n", 0o600);
        let (_directory, long) = file(&[b'x'; 5000], 0o600);
        let pipe = format!("{long}.pipe");
        mknodat(CWD, &pipe, FileType::Fifo, Mode::RUSR | Mode::WUSR, 0).unwrap();
        for (pairs, part) in [
            (&[("DRUMLINE_SECRET", "swordfish")][..], "DRUMLINE_SECRET: a secret of 9 bytes"),
            (&[("DRUMLINE_SECRET", "")], "a secret of 0 bytes"),
            (&[("DRUMLINE_SECRET_FILE", "/no/such/file")], "/no/such/file): cannot be read"),
            (&[("DRUMLINE_SECRET_FILE", "/proc/self/fd/9999")], "close_fds"),
            (&[("DRUMLINE_SECRET_FILE", &open)], "mode 644"),
            (&[("DRUMLINE_SECRET_FILE", &short)], "9 bytes"),
            (&[("DRUMLINE_SECRET_FILE", &long)], "16 to 4096"),
            (&[("DRUMLINE_SECRET_FILE", &pipe)], "cannot be read: it is no regular file"),
            (&[("DRUMLINE_SECRET_FILE", "/dev/tty")], "cannot be read"),
            (&[("DRUMLINE_SECRET", TEXT), ("DRUMLINE_SECRET_FILE", &open)], "both are set"),
        ] {
            let error = from(pairs).unwrap_err();
            let shown = format!("{error} {error:?}");
            assert!(shown.contains(part), "{shown}");
            assert!(!shown.contains("swordfish"), "{shown}");
        }
    }

    #[test]
    fn nothing_prints_a_secret() {
        let secret = Some(Secret::new(TEXT).unwrap());
        let shown = format!("{secret:?} {secret:#?}");
        assert!(shown.contains("Secret(..)") && !shown.contains("swordfish"), "{shown}");
    }
}
