//! What every worker executes: a Python script, a Python module, or any other program. It is found before any rank
//! starts, so that a typing error is reported once and not by every rank.

use std::{
    ffi::{OsStr, OsString},
    fs, io,
    os::unix::ffi::{OsStrExt, OsStringExt},
    path::{Path, PathBuf},
};

use rustix::fs::{Access, access};

use crate::{Error, Job, Result};

/// How the program of a job is executed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ProgramKind {
    /// Under Python if its name ends in `.py`, else as it is.
    #[default]
    Named,
    /// Under Python, as a module: `-m`.
    Module,
    /// Under Python, whatever its name: `--run-path`.
    Script,
    /// As it is, whatever its name: `--no-python`.
    Exact,
}

impl ProgramKind {
    /// Whether a program of this name runs under Python.
    pub fn is_python(self, name: &OsStr) -> bool {
        match self {
            ProgramKind::Named => Path::new(name).extension() == Some("py".as_ref()),
            ProgramKind::Module | ProgramKind::Script => true,
            ProgramKind::Exact => false,
        }
    }

    /// The command that executes `name`: [`Job::program`] and [`Job::arguments`]. Python does not buffer its output.
    ///
    /// # Errors
    ///
    /// There is no script of this name.
    pub fn command(
        self,
        name: OsString,
        arguments: Vec<OsString>,
        python: impl FnOnce() -> OsString,
    ) -> Result<(OsString, Vec<OsString>)> {
        if !self.is_python(&name) {
            return Ok((name, arguments));
        }
        if self != ProgramKind::Module {
            // Python would look for a script in this directory only, not in `PATH`.
            let script = Path::new(&name);
            fs::metadata(script).map_err(|error| not_found(script, &error))?;
        }
        let module = (self == ProgramKind::Module).then_some("-m");
        let options = ["-u"].into_iter().chain(module).map(OsString::from);
        Ok((python(), options.chain([name]).chain(arguments).collect()))
    }
}

/// The Python interpreter: `chosen` (the variable `PYTHON_EXEC`), else `python3` in the directory of the program
/// `neighbour`, else `python3`, which is then looked up in `PATH`. A wheel puts `drumline` beside the interpreter
/// for which it was installed.
pub fn python(chosen: Option<OsString>, neighbour: Option<&Path>) -> OsString {
    let beside = || {
        let python = neighbour?.parent()?.join("python3");
        // Of a program in PATH, or in the working directory, the directory is not known.
        (python.components().count() > 1 && access(&python, Access::EXEC_OK).is_ok())
            .then(|| python.into())
    };
    chosen.filter(|name| !name.is_empty()).or_else(beside).unwrap_or_else(|| "python3".into())
}

/// What stands for the local rank in arguments.
const LOCAL_RANK: &[u8] = b"${local_rank}";

/// The arguments of the worker with this local rank: `${local_rank}` in them is replaced by it.
pub fn arguments_of(job: &Job, local_rank: usize) -> Vec<OsString> {
    let rank = local_rank.to_string();
    job.arguments.iter().map(|argument| with_local_rank(argument, rank.as_bytes())).collect()
}

fn with_local_rank(argument: &OsStr, rank: &[u8]) -> OsString {
    let (mut done, mut rest) = (Vec::new(), argument.as_bytes());
    while let Some(at) = rest.windows(LOCAL_RANK.len()).position(|part| part == LOCAL_RANK) {
        done.extend_from_slice(&rest[..at]);
        done.extend_from_slice(rank);
        rest = &rest[at + LOCAL_RANK.len()..];
    }
    done.extend_from_slice(rest);
    OsString::from_vec(done)
}

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
            (Err(Error::ProgramNotExecutable { .. }), Some(interpreter)) => format!(
                "this directory has it, and it is a script: put `{interpreter}` in front, as in \
                 drumline run -- {interpreter} {}",
                name.display()
            ),
            _ if name == "python3" => {
                "no directory of PATH has it; PYTHON_EXEC names an interpreter elsewhere".into()
            }
            _ => "no directory of PATH has it".into(),
        },
    }))
}

fn check(file: &Path) -> Result<PathBuf> {
    let problem = match fs::metadata(file) {
        Err(error) => return Err(not_found(file, &error)),
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

fn not_found(file: &Path, error: &io::Error) -> Error {
    let (program, mut hint) = (file.into(), error.to_string());
    if let (true, Ok(here)) = (file.is_relative(), std::env::current_dir()) {
        hint.push_str(&format!(", seen from {}", here.display()));
    }
    Error::ProgramNotFound { program, hint }
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
mod tests;
