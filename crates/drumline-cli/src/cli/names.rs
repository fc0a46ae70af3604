//! What an option is called in errors: as the user gave it.

/// The variables `PET_...` that gave options, and what is to be told of others.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Names {
    pub(super) taken: Vec<Taken>,
    /// Why variables are left out. Nobody has typed them for this command, so they do not stop it.
    pub(crate) left_out: Vec<String>,
}

/// An option that a variable gave.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Taken {
    /// The long name of the option: `rdzv-id`.
    pub(super) option: String,
    pub(super) value: String,
}

impl Names {
    /// The variable that gave this option, else the option itself: `PET_NNODES`, `--nnodes`.
    pub(super) fn of(&self, option: &str) -> String {
        match self.taken.iter().any(|taken| taken.option == option) {
            true => variable(option),
            false => format!("--{option}"),
        }
    }

    /// `PET_NNODES=2, PET_ROLE=trainer`. Empty if no option came from a variable.
    pub(crate) fn listed(&self) -> String {
        let variables =
            self.taken.iter().map(|taken| format!("{}={}", variable(&taken.option), taken.value));
        variables.collect::<Vec<_>>().join(", ")
    }
}

/// Why a command line is refused.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Refusal {
    pub(crate) text: String,
    /// Of options that contradict each other: those that may go, the least important one first.
    pub(super) may_go: Vec<&'static str>,
}

impl Refusal {
    pub(super) fn of(text: String, may_go: impl Into<Vec<&'static str>>) -> Refusal {
        Refusal { text, may_go: may_go.into() }
    }

    /// The option that a variable gave, and without which the rest may make sense.
    pub(super) fn can_leave_out(&self, names: &Names) -> Option<String> {
        let given = |option: &&str| names.taken.iter().find(|taken| taken.option == *option);
        self.may_go.iter().find_map(given).map(|taken| taken.option.clone())
    }
}

impl From<String> for Refusal {
    fn from(text: String) -> Refusal {
        Refusal::of(text, [])
    }
}

/// What the variables begin with.
pub(super) const PREFIX: &str = "PET_";

/// The variable that gives this option: `PET_RDZV_ID` for `rdzv-id`.
pub(super) fn variable(option: &str) -> String {
    format!("{PREFIX}{}", option.replace('-', "_").to_uppercase())
}
