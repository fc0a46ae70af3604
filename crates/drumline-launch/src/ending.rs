//! How a process ended.

use std::{fmt, os::unix::process::ExitStatusExt, process::ExitStatus};

use drumline::blame::is_never_a_reaction;

/// How a process ended: by itself, or by a signal.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub enum Ending {
    /// It called `exit` with this code, 0 to 255.
    Code(i32),
    /// A signal killed it.
    Signal {
        /// The signal's number.
        number: i32,
        /// Whether the kernel wrote a core file.
        core_dumped: bool,
    },
}

impl Ending {
    /// What SIGKILL makes of a process.
    pub(crate) const KILLED: Ending = Ending::Signal { number: 9, core_dumped: false };

    pub(crate) fn of(status: ExitStatus) -> Ending {
        let signal = status.signal();
        signal.map_or(Ending::Code(status.code().unwrap_or(1)), |number| Ending::Signal {
            number,
            core_dumped: status.core_dumped(),
        })
    }

    /// Whether the process ended well.
    pub fn is_success(self) -> bool {
        self == Ending::Code(0)
    }

    /// Whether the process ended by itself.
    pub(crate) fn is_code(self) -> bool {
        matches!(self, Ending::Code(_))
    }

    /// The exit code of a launcher whose rank ended like this. As in a shell, 128 + number for a signal.
    pub fn exit_code(self) -> u8 {
        match self {
            Ending::Code(code) => u8::try_from(code).unwrap_or(1),
            Ending::Signal { number, .. } => signal_exit_code(number),
        }
    }

    /// The exit code, or -n after signal n.
    pub(crate) fn code(self) -> i32 {
        match self {
            Ending::Code(code) => code,
            Ending::Signal { number, .. } => -number,
        }
    }

    /// Whether the death of a peer cannot have caused this ending.
    ///
    /// A rank that loses a peer exits with an error or aborts. It does not access a bad address, and
    /// the kernel does not kill it. So when several ranks end at about the same time, such an ending is
    /// the likelier origin.
    pub fn is_never_a_reaction(self) -> bool {
        matches!(self, Ending::Signal { number, .. } if is_never_a_reaction(number))
    }
}

/// `exit code 3`, `SIGKILL`, `SIGSEGV, core dumped`.
impl fmt::Display for Ending {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            Ending::Code(code) => write!(f, "exit code {code}"),
            Ending::Signal { number, core_dumped } => {
                f.write_str(&signal_name(number))?;
                f.write_str(if core_dumped { ", core dumped" } else { "" })
            }
        }
    }
}

/// The name of a signal, `signal 35` for those without one.
pub(crate) fn signal_name(number: i32) -> String {
    match signal_hook::low_level::signal_name(number) {
        Some(name) => name.to_owned(),
        None => format!("signal {number}"),
    }
}

/// The exit code of a process that signal `number` ended.
pub(crate) fn signal_exit_code(number: i32) -> u8 {
    u8::try_from(128 + number).unwrap_or(u8::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exit_codes_are_those_of_a_shell() {
        assert_eq!(Ending::Code(7).exit_code(), 7);
        assert_eq!(Ending::Signal { number: 9, core_dumped: false }.exit_code(), 137);
        assert_eq!(Ending::Signal { number: 11, core_dumped: true }.exit_code(), 139);
    }

    #[test]
    fn endings_read_well() {
        assert_eq!(Ending::Code(3).to_string(), "exit code 3");
        assert_eq!(
            Ending::Signal { number: 11, core_dumped: true }.to_string(),
            "SIGSEGV, core dumped"
        );
        assert_eq!(Ending::Signal { number: 40, core_dumped: false }.to_string(), "signal 40");
    }
}
