//! Finds the program before any rank starts, so that a typing error is reported once and not by every
//! rank.

use std::{
    ffi::{OsStr, OsString},
    fs,
    path::{Path, PathBuf},
};

use rustix::fs::{Access, access};

use crate::{Error, Result};

/// The file that a shell would execute for `name`: `name` itself if it contains a slash; otherwise the first
/// executable of that name in a directory of `path` (the variable `PATH`).
pub(crate) fn resolve(name: &OsStr, path: Option<OsString>) -> Result<PathBuf> {
    let has_slash = name.as_encoded_bytes().contains(&b'/');
    let name = Path::new(name);
    if has_slash {
        return check(name);
    }
    let path = path.unwrap_or_else(|| "/usr/bin:/bin".into());
    let candidates = std::env::split_paths(&path).map(|directory| {
        // An empty entry of PATH means the working directory.
        Path::new(".").join(directory).join(name)
    });
    let mut not_executable = None;
    for candidate in candidates {
        match check(&candidate) {
            Ok(found) => return Ok(found),
            Err(error @ Error::ProgramNotExecutable { .. }) => {
                not_executable.get_or_insert(error);
            }
            Err(_) => {}
        }
    }
    Err(not_executable.unwrap_or_else(|| Error::ProgramNotFound {
        program: name.into(),
        hint: match (check(&Path::new(".").join(name)), interpreter(name)) {
            (Ok(_), _) => {
                format!(
                    "no directory of PATH has it, but this one does: write ./{}",
                    name.display()
                )
            }
            // torchrun would take it.
            (Err(Error::ProgramNotExecutable { .. }), Some(interpreter)) => format!(
                "this directory has it, and it is a script: put `{interpreter}` in front, as in \
                 drumline run -- {interpreter} {}",
                name.display()
            ),
            _ => "no directory of PATH has it".into(),
        },
    }))
}

fn check(file: &Path) -> Result<PathBuf> {
    let problem = match fs::metadata(file) {
        Err(error) => {
            let (program, mut hint) = (file.into(), error.to_string());
            if let (true, Ok(here)) = (file.is_relative(), std::env::current_dir()) {
                hint.push_str(&format!(", seen from {}", here.display()));
            }
            return Err(Error::ProgramNotFound { program, hint });
        }
        Ok(metadata) if metadata.is_dir() => "it is a directory".into(),
        Ok(_) if access(file, Access::EXEC_OK).is_ok() => return Ok(file.into()),
        Ok(_) => match interpreter(file) {
            Some(interpreter) => {
                format!("it is a script without permission to execute; run `{interpreter}` on it")
            }
            None => "its permissions do not allow it; is `chmod +x` missing?".into(),
        },
    };
    Err(Error::ProgramNotExecutable { program: file.into(), hint: problem })
}

/// The interpreter of scripts with this file's extension.
fn interpreter(file: &Path) -> Option<&'static str> {
    match file.extension()?.to_str()? {
        "py" => Some("python3"),
        "sh" => Some("sh"),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    #[test]
    fn the_first_executable_of_the_path_wins() {
        let root = tempfile::tempdir().unwrap();
        for (directory, mode) in [("a", 0o644), ("b", 0o755), ("c", 0o755)] {
            let directory = root.path().join(directory);
            fs::create_dir(&directory).unwrap();
            fs::write(directory.join("train"), "").unwrap();
            let permissions = fs::Permissions::from_mode(mode);
            fs::set_permissions(directory.join("train"), permissions).unwrap();
        }
        let path = |directories: &[&str]| {
            std::env::join_paths(directories.iter().map(|d| root.path().join(d))).ok()
        };
        let name = OsStr::new("train");
        assert_eq!(resolve(name, path(&["a", "b", "c"])).unwrap(), root.path().join("b/train"));
        assert_eq!(resolve(name, path(&["a"])).unwrap_err().exit_code(), 126);
        assert_eq!(resolve(name, path(&["missing"])).unwrap_err().exit_code(), 127);
        assert!(resolve(OsStr::new("sh"), None).is_ok());
    }

    #[test]
    fn a_name_with_a_slash_is_not_searched_for() {
        let root = tempfile::tempdir().unwrap();
        let script = root.path().join("train.py");
        assert_eq!(resolve(script.as_os_str(), None).unwrap_err().exit_code(), 127);
        fs::write(&script, "").unwrap();
        let error = resolve(script.as_os_str(), None).unwrap_err();
        assert!(error.to_string().contains("python3"), "{error}");
        let error = resolve(root.path().as_os_str(), None).unwrap_err();
        assert!(error.to_string().contains("directory"), "{error}");
    }
}
