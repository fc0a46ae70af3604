//! What stands for completion and the manual in a build without the feature `pages`.

use std::str::FromStr;

use clap::Command;

/// A shell whose command line could be completed: there is none.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Shell {}

impl FromStr for Shell {
    type Err = &'static str;

    fn from_str(_: &str) -> Result<Shell, &'static str> {
        Err("this program is built without the feature `pages`")
    }
}

pub(super) fn completion(_: Command, shell: Shell) -> String {
    match shell {}
}
