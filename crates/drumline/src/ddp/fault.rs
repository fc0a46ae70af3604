use std::fmt;

/// Why the gradient of one parameter could not be averaged, and where.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct GradientFault {
    /// The parameter's name.
    pub parameter: String,
    /// What is wrong.
    pub kind: FaultKind,
    /// The ranks on which it happened, in rising order.
    pub ranks: Vec<usize>,
}

/// What can be wrong with a gradient.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
#[repr(u8)]
pub enum FaultKind {
    /// Backward ended without a gradient: forward or the loss did not use the parameter.
    Unused = 1,
    /// The gradient was handed in a second time in one step.
    Twice = 2,
    /// The gradient has another dtype or number of elements than the parameter.
    WrongType = 3,
}

impl FaultKind {
    /// The kind that a peer's status byte means; `None` for 0, which is "no fault".
    pub(super) fn from_status(status: u8) -> Option<Self> {
        match status {
            0 => None,
            1 => Some(FaultKind::Unused),
            2 => Some(FaultKind::Twice),
            _ => Some(FaultKind::WrongType),
        }
    }
}

impl GradientFault {
    /// `kind` happened to `parameter` on `ranks`.
    pub fn new(parameter: impl Into<String>, kind: FaultKind, ranks: Vec<usize>) -> Self {
        Self { parameter: parameter.into(), kind, ranks }
    }

    /// All faults in one line, of bounded length.
    pub(crate) fn list(faults: &[GradientFault]) -> String {
        const SHOWN_MAX: usize = 8;
        let shown: Vec<String> =
            faults.iter().take(SHOWN_MAX).map(GradientFault::to_string).collect();
        let more = match faults.len().saturating_sub(SHOWN_MAX) {
            0 => String::new(),
            more => format!("; and {more} more"),
        };
        format!("{}{more}", shown.join("; "))
    }
}

impl fmt::Display for GradientFault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let plural = if self.ranks.len() == 1 { "" } else { "s" };
        let ranks: Vec<String> = self.ranks.iter().map(usize::to_string).collect();
        write!(f, "parameter `{}` ", self.parameter)?;
        f.write_str(match self.kind {
            FaultKind::Unused => "got no gradient",
            FaultKind::Twice => "got two gradients in one step",
            FaultKind::WrongType => "got a gradient of another dtype or length",
        })?;
        write!(f, " on rank{plural} {}", ranks.join(", "))
    }
}
