//! What is made of the definition of the command line: completion for shells, and pages of the manual.

use std::io;

use clap::Command;
pub(crate) use clap_complete::Shell;
use clap_complete::generate;
use clap_mangen::Man;

/// The script that makes `shell` complete the command line.
pub(super) fn completion(mut command: Command, shell: Shell) -> String {
    let mut script = Vec::new();
    generate(shell, &mut command, "drumline", &mut script);
    String::from_utf8_lossy(&script).into_owned()
}

/// The page of the manual about the command below `command` that has this name, or about `command` itself.
/// `None`: there is no such command.
pub(super) fn manual(mut command: Command, name: Option<&str>) -> io::Result<Option<String>> {
    command.build();
    let about = match name {
        None => Some(&command),
        Some(name) => command.find_subcommand(name),
    };
    let Some(about) = about.cloned() else { return Ok(None) };
    let mut page = Vec::new();
    Man::new(about).render(&mut page)?;
    Ok(Some(String::from_utf8_lossy(&page).into_owned()))
}
