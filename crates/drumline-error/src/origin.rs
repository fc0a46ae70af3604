//! Where an error comes from.

use std::io;

/// Where an error comes from. It says whether another attempt makes sense.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum ErrorOrigin {
    /// The user's mistake, in an argument, a setting, a program or a file: another attempt would end in the same way.
    User,
    /// The surroundings: network, disk, memory, other programs. They may be well again in a while.
    Surroundings,
    /// Another process of the job, which has not come, has ended, or hangs.
    Peer,
    /// What no correct process does: a fault of this library, another version of it, or damaged memory.
    Bug,
}

impl ErrorOrigin {
    /// That of the system's error. A path that leads to nothing, or not to a file, is a mistake of whoever wrote it. So
    /// is what the system does not allow.
    pub fn of_system(error: &io::Error) -> ErrorOrigin {
        use io::ErrorKind::{
            ArgumentListTooLong, InvalidFilename, InvalidInput, IsADirectory, NotADirectory,
            NotFound, PermissionDenied, Unsupported,
        };
        match error.kind() {
            ArgumentListTooLong | InvalidFilename | InvalidInput | IsADirectory | NotADirectory
            | NotFound | PermissionDenied | Unsupported => ErrorOrigin::User,
            _ => ErrorOrigin::Surroundings,
        }
    }
}
