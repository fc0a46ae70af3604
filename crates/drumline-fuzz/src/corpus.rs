//! The corpus: files `corpus/DECODER/NAME` with inputs for each decoder.

use std::{
    fs, io,
    path::{Path, PathBuf},
};

use xxhash_rust::xxh3::xxh3_64;

use crate::Decoder;

/// The beginning of the names of recordings. A recording has bytes that an encoder has made and that the
/// decoder takes.
pub const RECORDED: &str = "recorded-";

/// The corpus folder of a decoder.
pub fn folder(decoder: &Decoder) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("corpus").join(decoder.name)
}

/// Reads the files of a decoder's corpus folder. Returns their names and contents, sorted by name.
///
/// # Errors
///
/// A file cannot be read.
pub fn read(decoder: &Decoder) -> io::Result<Vec<(String, Vec<u8>)>> {
    let mut files = Vec::new();
    for entry in fs::read_dir(folder(decoder))? {
        let path = entry?.path();
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        files.push((name, fs::read(&path)?));
    }
    files.sort();
    Ok(files)
}

/// Writes an input with which a decoder has failed into the corpus. Returns the path of the file.
///
/// # Errors
///
/// The file cannot be written.
pub fn keep(decoder: &Decoder, bytes: &[u8]) -> io::Result<PathBuf> {
    let path = folder(decoder).join(format!("found-{:016x}", xxh3_64(bytes)));
    fs::write(&path, bytes)?;
    Ok(path)
}
