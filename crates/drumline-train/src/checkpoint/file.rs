//! The file of a checkpoint.

use std::{
    io::{self, Read, Write},
    path::Path,
};

use drumline_shm::files::split;

use super::{
    content::Checkpoint,
    disk::{Disk, SystemDisk},
    format, memory, replace,
    tensor::Tensor,
};
use crate::{Error, Result, failure};

/// Drumline's own names in a file's metadata begin with this.
const RESERVED: &str = "drumline.";
/// The metadata entry that holds [`Checkpoint::digest`], in hexadecimal.
const DIGEST_KEY: &str = "drumline.digest";
/// The metadata entry that holds [`FORMAT`].
const FORMAT_KEY: &str = "drumline.format";
/// The version of the format: goes up by one with each change that older programs cannot read.
const FORMAT: u32 = 1;

impl Checkpoint {
    /// Writes the checkpoint to `path`. An existing file is replaced only when the whole new one is
    /// on the disk.
    ///
    /// Equal checkpoints make equal files. Until it is complete, the file has a name that begins
    /// with a dot and ends with `.partial`. A process that is killed may leave such a file behind;
    /// the next write to `path` deletes it. To keep more than one file, see
    /// [`CheckpointDirectory`](super::CheckpointDirectory).
    ///
    /// # Errors
    ///
    /// [`Checkpoint`](crate::ErrorKind::Checkpoint) when a file cannot be written there, or when the metadata uses a
    /// reserved name. `path` is then as it was.
    pub fn write(&self, path: &Path) -> Result<()> {
        if let Ok((directory, name)) = split(path) {
            replace::remove_leftovers(&SystemDisk, directory, &format!("{}.", name.display()));
        }
        self.write_on(&SystemDisk, path)
    }

    /// Reads the file that [`Checkpoint::write`] wrote.
    ///
    /// # Errors
    ///
    /// [`Checkpoint`](crate::ErrorKind::Checkpoint) when there is no such file, or when it is cut short, damaged, or not
    /// written by Drumline; when it is no regular file, or larger than the memory that is free.
    /// Whatever the header claims, the memory in use stays in proportion to the size of the file.
    pub fn read(path: &Path) -> Result<Self> {
        Self::read_on(&SystemDisk, path).map_err(|refusal| refusal.into_error(path))
    }

    pub(super) fn write_on(&self, disk: &impl Disk, path: &Path) -> Result<()> {
        let fail = |problem| failure::checkpoint(path, problem);
        let (header, tensors) = self.to_parts().map_err(fail)?;
        replace::atomically(disk, path, |file| {
            file.write_all(&header)?;
            tensors.iter().try_for_each(|tensor| file.write_all(tensor.bytes()))
        })
        .map_err(|error| fail(format!("cannot be written: {}", why_not_written(&error))))
    }

    pub(super) fn read_on(disk: &impl Disk, path: &Path) -> Result<Self, Refusal> {
        let (mut file, length) = disk.open(path).map_err(|error| match error.kind() {
            io::ErrorKind::NotFound => Refusal::Missing,
            _ => Refusal::Unusable(format!("cannot be read: {error}")),
        })?;
        // A file of holes may be larger than any memory, and the system ends a process that takes
        // more than there is.
        if let Some(free) = memory::available().filter(|free| length > *free) {
            return Err(Refusal::Unusable(format!(
                "it has {length} bytes, more than the {free} that are free in memory"
            )));
        }
        Self::parse(&mut file, length)
    }

    /// The file's header, and the tensors in the order in which they follow it. The error says what
    /// is wrong.
    fn to_parts(&self) -> Result<(Vec<u8>, Vec<&Tensor>), String> {
        if let Some(name) = self.metadata.keys().find(|name| name.starts_with(RESERVED)) {
            return Err(format!("the metadata uses the reserved name {name}"));
        }
        let mut metadata = self.metadata.clone();
        metadata.insert(DIGEST_KEY.into(), format!("{:032x}", self.digest()));
        metadata.insert(FORMAT_KEY.into(), FORMAT.to_string());
        let tensors = format::file_order(self.tensors());
        Ok((format::header(&tensors, &metadata)?, tensors))
    }

    /// Reads a file of `length` bytes.
    fn parse(input: &mut impl Read, length: u64) -> Result<Self, Refusal> {
        let header = format::parse_header(input, length).map_err(Refusal::Unusable)?;
        let mut metadata = header.metadata;
        let mut reserved = |key: &str| {
            metadata.remove(key).ok_or_else(|| {
                let problem =
                    format!("it has no {key} in its metadata, so Drumline did not write it");
                Refusal::Unusable(problem)
            })
        };
        let (format, recorded) = (reserved(FORMAT_KEY)?, reserved(DIGEST_KEY)?);
        if format.parse().is_ok_and(|format: u32| format > FORMAT) {
            return Err(Refusal::Newer(format));
        }
        let mut checkpoint = Checkpoint::default();
        checkpoint.metadata = metadata;
        for entry in header.entries {
            checkpoint.insert(entry.read_tensor(input).map_err(Refusal::Unusable)?);
        }
        let digest = format!("{:032x}", checkpoint.digest());
        if recorded != digest {
            return Err(Refusal::Unusable(format!(
                "it is damaged: its content has digest {digest}, but {recorded} was written"
            )));
        }
        // The digest does not cover the spelling of the header, but the writer has only one.
        if checkpoint.to_parts().is_ok_and(|(bytes, _)| bytes == header.bytes) {
            return Ok(checkpoint);
        }
        Err(Refusal::Unusable("it is damaged: its header is not as it was written".into()))
    }

    /// The bytes of the file.
    #[doc(hidden)]
    pub fn to_bytes(&self) -> Result<Vec<u8>, String> {
        let (mut bytes, tensors) = self.to_parts()?;
        tensors.iter().for_each(|tensor| bytes.extend_from_slice(tensor.bytes()));
        Ok(bytes)
    }

    /// Parses the bytes of a file.
    #[doc(hidden)]
    pub fn from_bytes(mut bytes: &[u8]) -> Result<Self, String> {
        let length = bytes.len() as u64;
        Self::parse(&mut bytes, length).map_err(|refusal| refusal.problem())
    }
}

/// Why training cannot go on from a file.
#[derive(Debug)]
pub(super) enum Refusal {
    /// There is no such file.
    Missing,
    /// A later version of this crate wrote it, in this version of the format.
    Newer(String),
    /// It cannot be read, is damaged, or is no checkpoint. The text says which.
    Unusable(String),
}

impl Refusal {
    /// What is wrong, and what to do.
    pub(super) fn problem(self) -> String {
        match self {
            Refusal::Missing => {
                "there is no such file; check the path, or start without a checkpoint".into()
            }
            Refusal::Newer(format) => format!(
                "it has format {format}, this program reads up to {FORMAT}; resume with the newer \
                 program that wrote it, or delete it"
            ),
            Refusal::Unusable(problem) => {
                format!("{problem}; delete it or resume from an earlier one")
            }
        }
    }

    pub(super) fn into_error(self, path: &Path) -> Error {
        failure::checkpoint(path, self.problem())
    }
}

/// The system's error, and what to do about it.
pub(super) fn why_not_written(error: &io::Error) -> String {
    let advice = match error.kind() {
        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => {
            "; free some space there, or keep fewer checkpoints"
        }
        io::ErrorKind::PermissionDenied | io::ErrorKind::ReadOnlyFilesystem => {
            "; choose a directory that this user may write to"
        }
        io::ErrorKind::NotFound => "; make the directory first",
        io::ErrorKind::NotADirectory | io::ErrorKind::AlreadyExists => {
            "; choose a path that is not taken by a file"
        }
        _ => "",
    };
    format!("{error}{advice}")
}
