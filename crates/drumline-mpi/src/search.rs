//! Where a library of MPI is looked for, in which order, and what was tried.

use std::env;
use std::ffi::OsStr;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use crate::error::{Error, Result};
use crate::launcher::{Family, launcher};
use drumline_loader::{Library, why};

/// Names of MPI libraries, and the family that alone uses the name.
const NAMES: [(&str, Option<Family>); 6] = [
    ("libmpi_abi.so.1", None),
    ("libmpi.so.40", Some(Family::OpenMpi)),
    ("libmpi.so.12", Some(Family::Mpich)),
    ("libmpich.so.12", Some(Family::Mpich)),
    ("libmpi_abi.so.0", None),
    ("libmpi.so", None),
];

/// Programs that start ranks. Where they are, a library is near.
const LAUNCHERS: [&str; 2] = ["mpiexec", "mpirun"];

/// Where libraries are installed, as the program has said.
static PREFIXES: Mutex<Vec<PathBuf>> = Mutex::new(Vec::new());

/// Has the search look in `prefix/lib`, too, after all other places. Python says so where its packages are.
pub fn look_in(prefix: impl Into<PathBuf>) {
    PREFIXES.lock().unwrap_or_else(PoisonError::into_inner).push(prefix.into());
}

/// Finds a library that `look_at` accepts, and returns what `look_at` makes of it.
///
/// What this process has loaded already comes first: two MPIs in one process disturb each other. Then comes the
/// path that the user has named, and nothing after it. Then each name in the dynamic loader's way, and near the
/// launchers.
///
/// # Errors
///
/// [`Error::NotFound`] lists all that was tried. Of the user's path, what `look_at` says.
pub(crate) fn find<T>(
    named: Option<&Path>,
    mut look_at: impl FnMut(Library, &Path) -> Result<T>,
) -> Result<T> {
    let mut tried = Vec::new();
    for (name, _) in NAMES {
        let Some(library) = Library::loaded(OsStr::new(name)) else { continue };
        match look_at(library, Path::new(name)) {
            Ok(found) => return Ok(found),
            Err(error) => tried.push(format!("{name}, which this process has loaded: {error}")),
        }
    }
    if let Some(path) = named {
        let opened = Library::open(path.as_os_str());
        let not_found = |reason| Error::NotFound { tried: vec![why(path, reason)] };
        return look_at(opened.map_err(not_found)?, path);
    }
    let said = PREFIXES.lock().unwrap_or_else(PoisonError::into_inner).clone();
    let places = places(|name| env::var_os(name).map(PathBuf::from), &own_launcher(), &said);
    for candidate in candidates(launcher().and_then(|it| it.family()), &places) {
        if candidate.is_absolute() && !candidate.exists() {
            continue; // of a place, the summary below tells
        }
        let found = Library::open(candidate.as_os_str())
            .map_err(|reason| why(&candidate, reason))
            .and_then(|library| look_at(library, &candidate).map_err(|it| it.to_string()));
        match found {
            Ok(found) => return Ok(found),
            Err(reason) => tried.push(reason),
        }
    }
    tried.extend(
        places.iter().map(|place| format!("{}: nothing else of these names", place.display())),
    );
    Err(Error::NotFound { tried })
}

/// All that is tried, in order. The names of the launcher's family come first, wherever they are found.
fn candidates(prefer: Option<Family>, places: &[PathBuf]) -> Vec<PathBuf> {
    let mut names = NAMES;
    names.sort_by_key(|(_, family)| match family {
        _ if prefer.is_none() => 0,
        family if *family == prefer => 0,
        None => 1,
        Some(_) => 2,
    });
    let (first, last): (Vec<_>, Vec<_>) = names
        .into_iter()
        .partition(|(_, family)| prefer.is_none() || family.is_none() || *family == prefer);
    let everywhere = |names: Vec<(&str, Option<Family>)>| {
        let loader = names.iter().map(|(name, _)| PathBuf::from(name));
        let near =
            places.iter().flat_map(|place| names.iter().map(move |(name, _)| place.join(name)));
        loader.chain(near).collect::<Vec<_>>()
    };
    [first, last].into_iter().flat_map(everywhere).collect()
}

/// The directories of libraries near launchers: of the launcher that has started this process, of those in `PATH`, of
/// Python's environment, and of Intel's settings. Then those that the program has said.
fn places(
    variable: impl Fn(&str) -> Option<PathBuf>,
    own_launcher: &[PathBuf],
    said: &[PathBuf],
) -> Vec<PathBuf> {
    let path = variable("PATH").unwrap_or_default();
    let in_path =
        env::split_paths(&path).filter(|it| LAUNCHERS.iter().any(|name| it.join(name).is_file()));
    // A launcher may be a link to where it is installed.
    let installed = |bin: PathBuf| {
        let real = LAUNCHERS.iter().find_map(|name| fs::canonicalize(bin.join(name)).ok());
        [Some(bin), real.and_then(|real| Some(real.parent()?.to_owned()))]
    };
    let bins = own_launcher.iter().cloned().chain(in_path.flat_map(installed).flatten());
    let prefixes = bins.filter_map(|bin| Some(bin.parent()?.to_owned()));
    let named = ["VIRTUAL_ENV", "I_MPI_ROOT"].into_iter().filter_map(variable);
    let mut places = Vec::new();
    for prefix in prefixes.chain(named).chain(said.iter().cloned()) {
        for lib in ["lib", "lib64", "lib/release"] {
            let place = prefix.join(lib);
            if place.is_dir() && !places.contains(&place) {
                places.push(place);
            }
        }
    }
    places
}

/// The directory of the program that started this process, if it is part of a launcher.
fn own_launcher() -> Vec<PathBuf> {
    if launcher().is_none() {
        return Vec::new();
    }
    let parent = std::os::unix::process::parent_id();
    let program = fs::read_link(format!("/proc/{parent}/exe"));
    program.ok().and_then(|program| Some(program.parent()?.to_owned())).into_iter().collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn texts(paths: &[PathBuf]) -> Vec<&str> {
        paths.iter().map(|it| it.to_str().unwrap()).collect()
    }

    #[test]
    fn names_come_in_order_and_then_near_the_launchers() {
        let found = candidates(None, &[PathBuf::from("/a/lib")]);
        assert_eq!(texts(&found)[..3], ["libmpi_abi.so.1", "libmpi.so.40", "libmpi.so.12"]);
        assert_eq!(texts(&found)[6..8], ["/a/lib/libmpi_abi.so.1", "/a/lib/libmpi.so.40"]);
        assert_eq!(found.len(), 12);
    }

    #[test]
    fn the_family_of_the_launcher_comes_first_wherever_it_is() {
        let places = [PathBuf::from("/a/lib")];
        let found = candidates(Some(Family::OpenMpi), &places);
        assert_eq!(texts(&found)[..2], ["libmpi.so.40", "libmpi_abi.so.1"]);
        assert_eq!(texts(&found)[4], "/a/lib/libmpi.so.40");
        assert_eq!(texts(&found)[8], "libmpi.so.12", "the other family comes last");
        let found = candidates(Some(Family::Mpich), &places);
        assert_eq!(texts(&found)[..3], ["libmpi.so.12", "libmpich.so.12", "libmpi_abi.so.1"]);
        assert_eq!(*texts(&found).last().unwrap(), "/a/lib/libmpi.so.40");
    }

    #[test]
    fn places_are_beside_launchers_and_environments() {
        let home = tempfile::tempdir().unwrap();
        for path in [
            "path/bin",
            "path/lib",
            "none/bin",
            "none/lib",
            "venv/lib",
            "own/bin",
            "own/lib64",
            "py/lib",
        ] {
            fs::create_dir_all(home.path().join(path)).unwrap();
        }
        fs::write(home.path().join("path/bin/mpiexec"), "").unwrap();
        let path =
            env::join_paths(["none/bin", "path/bin"].map(|it| home.path().join(it))).unwrap();
        let variable = |name: &str| match name {
            "PATH" => Some(PathBuf::from(&path)),
            "VIRTUAL_ENV" => Some(home.path().join("venv")),
            _ => None,
        };
        let said = ["py", "venv"].map(|it| home.path().join(it));
        let found = places(variable, &[home.path().join("own/bin")], &said);
        let expected = ["own/lib64", "path/lib", "venv/lib", "py/lib"];
        assert_eq!(found, expected.map(|it| home.path().join(it)));
    }

    #[test]
    fn a_named_path_that_is_none_ends_the_search() {
        let error = find(Some(Path::new("/no/libmpi.so")), |_, _| Ok(())).unwrap_err();
        let Error::NotFound { tried } = error else { panic!("{error}") };
        assert_eq!(tried.len(), 1);
        assert!(tried[0].starts_with("/no/libmpi.so: "), "{tried:?}");
    }
}
