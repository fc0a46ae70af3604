//! Random numbers that are used once.

use drumline_shm::named;
use rustix::rand::{GetRandomFlags, getrandom};

use crate::{Error, Result};

/// A number that is used once: 32 random bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Nonce(pub [u8; 32]);

impl Nonce {
    /// A fresh nonce from the system.
    ///
    /// # Errors
    ///
    /// [`Io`](drumline_error::ErrorKind::Io) if the system gives no random bytes.
    pub fn random() -> Result<Nonce> {
        random_bytes().map(Nonce)
    }

    /// A name that nobody else has: 24 random hexadecimal digits.
    ///
    /// # Errors
    ///
    /// [`Io`](drumline_error::ErrorKind::Io) if the system gives no random bytes.
    pub fn name() -> Result<String> {
        Ok(random_bytes()?[..12].iter().map(|byte| format!("{byte:02x}")).collect())
    }
}

/// 32 random bytes from the system.
pub(super) fn random_bytes() -> Result<[u8; 32]> {
    let mut bytes = [0; 32];
    let mut have = 0;
    while have < bytes.len() {
        match getrandom(&mut bytes[have..], GetRandomFlags::empty()) {
            Ok(more) => have += more,
            Err(rustix::io::Errno::INTR) => {}
            Err(error) => {
                return Err(Error::io("cannot get random bytes", named("getrandom")(error)));
            }
        }
    }
    Ok(bytes)
}
