//! The sections of the page of errors.

use std::fmt;

/// docs/reference/errors.md. The link lets a released crate have the page.
const PAGE: &str = include_str!("../errors.txt");
const BEGIN: &str = " (drumline explain ";

macro_rules! sections {
    ($($section:ident $name:literal,)*) => {
        /// The section of the page of errors that explains an error: `drumline explain` prints it.
        ///
        /// The text of an error ends with the command:
        ///
        /// ```
        /// use drumline::Section;
        ///
        /// assert_eq!(Section::PeerExited.to_string(), "(drumline explain peer_exited)");
        /// assert_eq!(Section::find("peer_exited"), Some(Section::PeerExited));
        /// assert!(Section::PeerExited.explanation().starts_with("## peer_exited\n"));
        /// ```
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        #[non_exhaustive]
        pub enum Section {
            $(
                #[doc = concat!("`drumline explain ", $name, "`")]
                $section,
            )*
        }

        impl Section {
            /// All of them, in the order of the page.
            pub const ALL: &[Section] = &[$(Section::$section),*];

            /// Its name for `drumline explain`.
            pub const fn name(self) -> &'static str {
                match self {
                    $(Section::$section => $name,)*
                }
            }
        }
    };
}

sections! {
    PeerExited "peer_exited",
    PeerLeft "peer_left",
    NobodyLeft "nobody_left",
    HostSilent "host_silent",
    Disconnected "disconnected",
    Unreachable "unreachable",
    Reported "reported",
    Aborted "aborted",
    Panicked "panicked",
    System "system",
    Device "device",
    Mismatch "mismatch",
    Timeout "timeout",
    Backend "backend",
    Protocol "protocol",
    Poisoned "poisoned",
    NotAMember "not-a-member",
    Argument "argument",
    Secrets "secrets",
    Store "store",
    StartUp "start-up",
    Regroup "regroup",
    Settings "settings",
    Io "io",
    Memory "memory",
    Objects "objects",
    ModelsThatDiffer "models-that-differ",
    ParametersThatDiffer "parameters-that-differ",
    MissingGradients "missing-gradients",
    Checkpoints "checkpoints",
    ModelsOfBurn "models-of-burn",
    ModelsOfCandle "models-of-candle",
    Traces "traces",
    Program "program",
    Measuring "measuring",
    TheLauncher "the-launcher",
    SeveralHosts "several-hosts",
    ForeignLaunchers "foreign-launchers",
}

impl Section {
    /// The section of this name.
    pub fn find(name: &str) -> Option<Section> {
        Section::ALL.iter().copied().find(|section| section.name() == name)
    }

    /// What the page says, with the heading, in Markdown.
    pub fn explanation(self) -> &'static str {
        parts().find(|part| name_of(part) == self.name()).unwrap_or_default()
    }

    /// The text of an error without its section, and that section. A text that quotes another error has the section of
    /// that one, unless the quotation was cut.
    pub(crate) fn split(text: &str) -> Option<(String, Option<Section>)> {
        let (before, rest) = text.split_once(BEGIN)?;
        let (name, after) = rest.split_once(')').unwrap_or_default();
        Some((format!("{before}{after}"), Section::find(name)))
    }
}

/// How the text of an error ends.
impl fmt::Display for Section {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}{})", &BEGIN[1..], self.name())
    }
}

/// The sections of the page, each with its heading.
fn parts() -> impl Iterator<Item = &'static str> {
    let starts = PAGE.match_indices("\n## ").map(|(at, _)| at + 1);
    let ends = starts.clone().skip(1).chain([PAGE.len()]);
    starts.zip(ends).map(|(start, end)| PAGE[start..end].trim_end())
}

/// The name that the heading of a section gives it.
fn name_of(part: &str) -> String {
    let heading = part.lines().next().unwrap_or_default();
    heading.trim_start_matches("## ").replace(' ', "-")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_section_has_its_heading_and_each_heading_its_section() {
        let headings: Vec<_> =
            parts().map(name_of).filter(|name| name != "Find-it-by-its-text").collect();
        let names: Vec<_> = Section::ALL.iter().map(|section| section.name()).collect();
        assert_eq!(headings, names);
    }
}
