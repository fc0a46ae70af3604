//! The job's secret, and how the workers get it.
//!
//! The secret is in a sealed file in memory. Workers inherit its open descriptor and find it through
//! `DRUMLINE_SECRET_FILE`. A command line would show the secret to every user of the host. A variable would
//! be visible to the same user only, as the descriptor is. But programs print variables when they crash, logs
//! and notebooks show them, and every child inherits them.
//!
//! This has a price: if a program between launcher and rank closes descriptors (as Python's `subprocess` does
//! by default), the rank has no secret, and its error says so. A secret in the launcher's own environment is
//! passed on unchanged.

use std::{
    fs::{File, Permissions},
    io::{self, Write},
    os::{
        fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd},
        unix::fs::PermissionsExt,
    },
};

use drumline::{auth::Secret, named};
use rustix::{
    fs::{MemfdFlags, SealFlags, fcntl_add_seals, memfd_create},
    io::{Errno, FdFlags, fcntl_dupfd_cloexec, fcntl_setfd},
};

use crate::{Error, Result};

/// Holds the descriptor that workers inherit.
#[derive(Debug)]
pub(crate) struct JobSecret {
    pub(crate) secret: Secret,
    /// `None` if the workers inherit the user's own variable.
    file: Option<OwnedFd>,
}

/// Shell scripts use descriptors of one digit for themselves.
const DESCRIPTOR_MIN: i32 = 100;

impl JobSecret {
    /// The secret of the launcher's environment, or a fresh one.
    pub(crate) fn for_workers() -> Result<JobSecret> {
        if let Some(secret) = Secret::from_env()? {
            return Ok(JobSecret { secret, file: None });
        }
        JobSecret::of_job(Secret::random()?)
    }

    /// A secret that the user has not given.
    pub(crate) fn of_job(secret: Secret) -> Result<JobSecret> {
        let file = sealed(&secret).map_err(Error::system("hand the job's secret to its ranks"))?;
        Ok(JobSecret { secret, file: Some(file) })
    }

    /// Whether the secret comes from the user. Then other hosts may have it, too.
    pub(crate) fn is_shared(&self) -> bool {
        self.file.is_none()
    }

    /// The path at which a worker finds the secret. `None` if the user's own variable has it.
    pub(crate) fn path(&self) -> Option<String> {
        self.file.as_ref().map(|file| format!("/proc/self/fd/{}", file.as_raw_fd()))
    }
}

/// A file in memory that only this user can open, that cannot be changed, and that survives exec.
fn sealed(secret: &Secret) -> io::Result<OwnedFd> {
    let create = |flags| memfd_create("drumline-secret", flags);
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    // If vm.memfd_noexec is 2, the kernel requires this flag. Kernels before 6.3 do not know it.
    let memory = create(flags | MemfdFlags::NOEXEC_SEAL)
        .or_else(|error| if error == Errno::INVAL { create(flags) } else { Err(error) })
        .map_err(named("memfd_create"))?;
    let mut file = File::from(memory);
    file.write_all(secret.expose())?;
    file.set_permissions(Permissions::from_mode(0o400))?;
    let all = SealFlags::SEAL | SealFlags::SHRINK | SealFlags::GROW | SealFlags::WRITE;
    fcntl_add_seals(&file, all).map_err(named("fcntl"))?;
    inheritable(file.as_fd())
}

/// A duplicate that survives exec.
pub(crate) fn inheritable(file: BorrowedFd<'_>) -> io::Result<OwnedFd> {
    let file = match fcntl_dupfd_cloexec(file, DESCRIPTOR_MIN) {
        // The limit of open files is lower than DESCRIPTOR_MIN.
        Err(Errno::INVAL) => file.try_clone_to_owned()?,
        other => other.map_err(named("fcntl"))?,
    };
    fcntl_setfd(&file, FdFlags::empty()).map_err(named("fcntl"))?;
    Ok(file)
}

#[cfg(test)]
mod tests {
    use std::{fs, os::unix::fs::MetadataExt};

    use super::*;

    #[test]
    fn the_file_holds_the_secret_and_can_be_read_again_but_not_changed() {
        let secret = Secret::random().unwrap();
        let file = sealed(&secret).unwrap();
        let path = format!("/proc/self/fd/{}", file.as_raw_fd());
        for _ in 0..2 {
            assert_eq!(Secret::from_file(&path).unwrap(), secret);
        }
        assert_eq!(fs::metadata(&path).unwrap().mode() & 0o777, 0o400);
        assert!(File::from(file).write_all(b"another").is_err());
    }
}
