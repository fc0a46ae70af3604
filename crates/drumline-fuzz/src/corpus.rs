//! The files that are kept: `corpus/DECODER/NAME`.

use std::{
    fs, io,
    path::{Path, PathBuf},
};

use xxhash_rust::xxh3::xxh3_64;

use crate::Decoder;

/// What the name of a recording begins with: bytes that an encoder has made, and the decoder takes.
pub const RECORDED: &str = "recorded-";

/// The folder of a decoder.
pub fn folder(decoder: &Decoder) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("corpus").join(decoder.name)
}

/// The files of a decoder, with their names, in the order of these.
///
/// # Errors
///
/// When one cannot be read.
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

/// Keeps what a decoder has stumbled over. Returns where.
///
/// # Errors
///
/// When it cannot be written.
pub fn keep(decoder: &Decoder, bytes: &[u8]) -> io::Result<PathBuf> {
    let path = folder(decoder).join(format!("found-{:016x}", xxh3_64(bytes)));
    fs::write(&path, bytes)?;
    Ok(path)
}
