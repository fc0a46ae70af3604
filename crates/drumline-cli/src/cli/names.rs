//! What an option is called in errors: as the user gave it.

/// The variables `PET_...` that gave options.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Names(pub(super) Vec<Taken>);

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
        match self.0.iter().any(|taken| taken.option == option) {
            true => variable(option),
            false => format!("--{option}"),
        }
    }

    /// `PET_NNODES=2, PET_ROLE=trainer`. Empty if no option came from a variable.
    pub(crate) fn listed(&self) -> String {
        let variables =
            self.0.iter().map(|taken| format!("{}={}", variable(&taken.option), taken.value));
        variables.collect::<Vec<_>>().join(", ")
    }
}

/// What the variables begin with.
pub(super) const PREFIX: &str = "PET_";

/// The variable that gives this option: `PET_RDZV_ID` for `rdzv-id`.
pub(super) fn variable(option: &str) -> String {
    format!("{PREFIX}{}", option.replace('-', "_").to_uppercase())
}
