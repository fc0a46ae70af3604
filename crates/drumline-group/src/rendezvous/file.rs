//! Ranks that meet in a file that all of them see.

use std::{fs, os::unix::fs::MetadataExt as _, sync::Arc};

use drumline_store::store::{FileStore, Store as _};

use super::{
    place::Rendezvous,
    settings::{Setting, all_set, invalid, parse_query, place_of},
};
use crate::{Config, Error, Result};

/// Opens the store of `file:///path?rank=R&world_size=W`.
///
/// Ranks may come and leave in any order. The file exists as long as one rank has it open, and the last rank
/// deletes it.
pub(super) fn meet(url: &str, config: &Config) -> Result<Rendezvous> {
    let (path, rank, world_size) = parse(url)?;
    let store = FileStore::with_limit(&path, world_size, config.store_bytes_max)?;
    if config.secret.is_none() && !config.trust_store {
        check_private(&path)?;
    }
    store.set_timeout(config.timeout);
    Rendezvous::in_store(Arc::new(store), &path, (rank, world_size), config)
}

/// The path, the rank and the world size in a `file://` URL.
pub(crate) fn parse(url: &str) -> Result<(String, usize, usize)> {
    let place = url.split_once("://").map_or("", |(_, place)| place);
    let (path, query) = place.split_once('?').unwrap_or((place, ""));
    let [rank, world_size] = parse_query(query).map_err(|problem| invalid(url, problem))?;
    let path = Some(path).filter(|path| !path.is_empty());
    let settings = [("path", path), ("rank", rank), ("world_size", world_size)];
    let settings = settings.map(|(name, text)| Setting::of_url(url, name, text));
    all_set(&settings.each_ref(), "write file:///path?rank=R&world_size=W")?;
    let [path, rank, world_size] = &settings;
    if !path.text().starts_with('/') {
        let problem =
            format!("`{0}` does not begin at the root; is file:///{0} meant?", path.text());
        return Err(invalid(&path.name, problem));
    }
    let (rank, world_size) = place_of(rank, world_size)?;
    Ok((path.text().to_owned(), rank, world_size))
}

/// Checks that no other user may read or replace the file. Without a secret in the settings, the ranks leave one in it.
fn check_private(path: &str) -> Result<()> {
    let metadata = fs::metadata(path)
        .map_err(|error| Error::io(format!("look at file store {path}"), error))?;
    let is_ours = metadata.uid() == rustix::process::geteuid().as_raw();
    if is_ours && metadata.mode() & 0o077 == 0 {
        return Ok(());
    }
    let problem = format!(
        "not set, and other users can read or write {path}, in which the ranks would leave the \
         job's secret: let them have it alone (chmod 600), give all of them one secret of 16 \
         bytes or more, or, if you trust everybody who reaches the file, set \
         DRUMLINE_TRUST_STORE=1"
    );
    Err(invalid("DRUMLINE_SECRET", problem))
}
