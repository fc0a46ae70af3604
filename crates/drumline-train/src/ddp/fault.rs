use std::fmt;

/// Why the gradient of a parameter could not be averaged, and on which ranks.
///
/// ```
/// use drumline::ddp::{FaultKind, GradientFault};
///
/// let fault = GradientFault::new("layer1.weight", FaultKind::Unused, vec![0, 3]);
/// assert_eq!(fault.ranks, [0, 3]);
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct GradientFault {
    /// The parameter's name; empty if the fault is of none.
    pub parameter: String,
    /// What is wrong.
    pub kind: FaultKind,
    /// The ranks on which it happened, in rising order.
    pub ranks: Vec<usize>,
}

/// What can be wrong with a gradient.
///
/// ```
/// use drumline::{
///     DType, ProcessGroup,
///     ddp::{DdpOptions, FaultKind, GradientFault, GradientReducer, ParameterSpec},
/// };
///
/// let weight = ParameterSpec::new("weight", [2], DType::F32);
/// let reducer =
///     GradientReducer::new(vec![weight], &DdpOptions::default(), &ProcessGroup::alone())?;
/// let error = reducer.finish().unwrap_err();
/// let faults = error.detail::<Vec<GradientFault>>().unwrap();
/// assert_eq!(faults[0].kind, FaultKind::Unused);
///
/// reducer.submit(0, [1.0_f32; 3][..].into()); // the weight has two elements
/// let error = reducer.finish().unwrap_err();
/// let faults = error.detail::<Vec<GradientFault>>().unwrap();
/// assert_eq!(faults[0].kind, FaultKind::WrongType);
/// # Ok::<_, drumline::Error>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
#[repr(u8)]
pub enum FaultKind {
    /// Backward ended without a gradient, because neither forward nor the loss used the parameter.
    Unused = 1,
    /// The gradient was handed in a second time in one step.
    Twice = 2,
    /// The gradient has another dtype or number of elements than the parameter.
    WrongType = 3,
    /// The gradient could not be read from its device.
    Unread = 4,
    /// The new value, which only the parameter's owner has, could not be read from its device, or has another dtype or
    /// number of elements.
    Value = 5,
    /// The program failed before it had computed all gradients of a step of shards. The fault is of no parameter.
    Program = 6,
}

impl FaultKind {
    /// The kind of a peer's status byte; `None` for 0, which means no fault.
    pub(super) fn from_status(status: u8) -> Option<Self> {
        match status {
            0 => None,
            1 => Some(FaultKind::Unused),
            2 => Some(FaultKind::Twice),
            3 => Some(FaultKind::WrongType),
            5 => Some(FaultKind::Value),
            6 => Some(FaultKind::Program),
            _ => Some(FaultKind::Unread),
        }
    }
}

impl GradientFault {
    /// A fault of `parameter` on `ranks`.
    pub fn new(parameter: impl Into<String>, kind: FaultKind, ranks: Vec<usize>) -> Self {
        Self { parameter: parameter.into(), kind, ranks }
    }

    /// All faults in one line. Each parameter is named. Consecutive parameters with the same fault share a
    /// sentence.
    pub(crate) fn list(faults: &[GradientFault]) -> String {
        let alike = |a: &GradientFault, b: &GradientFault| (a.kind, &a.ranks) == (b.kind, &b.ranks);
        let sentences: Vec<String> = faults.chunk_by(alike).map(sentence).collect();
        sentences.join("; ")
    }

    /// What to do about `faults`. A device that has failed comes first, because it may be the cause of the others.
    pub(crate) fn advice(faults: &[GradientFault]) -> &'static str {
        let of_device =
            |fault: &GradientFault| matches!(fault.kind, FaultKind::Unread | FaultKind::Value);
        if faults.iter().any(|fault| fault.kind == FaultKind::Program) {
            return "that rank's own error says why";
        }
        if faults.iter().any(of_device) {
            return "the device failed there: that rank's own error says how";
        }
        "every parameter that is trained must take part in the loss, once per step and on every rank: \
         use it, or freeze it before the model is wrapped, or choose `UnusedParameters::Ignore`"
    }
}

impl fmt::Display for GradientFault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&sentence(std::slice::from_ref(self)))
    }
}

/// A sentence about `faults`, which is not empty. All of them have the same kind and ranks.
fn sentence(faults: &[GradientFault]) -> String {
    let plural = |count: usize| if count == 1 { "" } else { "s" };
    let names: Vec<String> = faults.iter().map(|fault| format!("`{}`", fault.parameter)).collect();
    let what = match faults[0].kind {
        FaultKind::Unused => "got no gradient",
        FaultKind::Twice => "got two gradients in one step",
        FaultKind::WrongType => "got a gradient of another dtype or length",
        FaultKind::Unread => match names.len() {
            1 => "has a gradient that could not be read from its device",
            _ => "have gradients that could not be read from their device",
        },
        FaultKind::Value => "got a new value that could not be sent",
        FaultKind::Program => "failed in the program",
    };
    let ranks = &faults[0].ranks;
    let whose = match faults[0].kind {
        FaultKind::Program => "the step".to_owned(),
        _ => format!("parameter{} {}", plural(names.len()), names.join(", ")),
    };
    format!("{whose} {what} on rank{} {}", plural(ranks.len()), list_ranks(ranks))
}

/// Ranks in rising order. Runs of three or more are shortened: `0, 1, 4 to 7`.
pub(crate) fn list_ranks(ranks: &[usize]) -> String {
    let runs = ranks.chunk_by(|a, b| a + 1 == *b).map(|run| match run {
        [first, _, .., last] => format!("{first} to {last}"),
        few => few.iter().map(usize::to_string).collect::<Vec<_>>().join(", "),
    });
    runs.collect::<Vec<_>>().join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_parameter_and_rank_is_named() {
        let unused = |name: &str, ranks: &[usize]| {
            GradientFault::new(name, FaultKind::Unused, ranks.to_vec())
        };
        let mut faults: Vec<GradientFault> =
            (0..40).map(|i| unused(&format!("p{i}"), &[0, 1, 3, 4, 5, 6, 9])).collect();
        faults.push(unused("q", &[2]));
        faults.push(GradientFault::new("r", FaultKind::Twice, vec![2]));
        let text = GradientFault::list(&faults);
        assert!((0..40).all(|i| text.contains(&format!("`p{i}`"))), "{text}");
        assert!(text.starts_with("parameters `p0`, `p1`, "), "{text}");
        assert!(
            text.ends_with(
                "`p39` got no gradient on ranks 0, 1, 3 to 6, 9; parameter `q` got no gradient on \
                 rank 2; parameter `r` got two gradients in one step on rank 2"
            ),
            "{text}"
        );
    }
}
