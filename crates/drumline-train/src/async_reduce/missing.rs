use std::fmt;

/// Tensors that a rank has not brought in a step of an
/// [`AsyncReduce`](crate::async_reduce::AsyncReduce).
///
/// ```
/// use drumline::{
///     ProcessGroup,
///     async_reduce::{AsyncReduceOptions, MissingTensors, TensorRegistry},
/// };
///
/// let mut tensors = TensorRegistry::new();
/// tensors.register::<f32>("weight", 3)?;
/// let mut reduce = tensors.freeze(&ProcessGroup::alone(), &AsyncReduceOptions::default())?;
/// let error = reduce.synchronize().unwrap_err();
/// let first = &error.detail::<Vec<MissingTensors>>().unwrap()[0];
/// assert_eq!((first.rank, &first.tensors[..]), (0, &["weight".to_owned()][..]));
/// # reduce.stop()?;
/// # Ok::<_, drumline::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct MissingTensors {
    /// The rank's number in the group.
    pub rank: usize,
    /// The names of the tensors.
    pub tensors: Vec<String>,
    /// Whether each of the tensors is known to be missing. A rank that no longer answers has told only which
    /// buckets are complete. If several tensors share an incomplete bucket, some of them may have come.
    pub is_exact: bool,
}

/// The most names in a text.
const NAMES_MAX: usize = 8;

impl MissingTensors {
    /// `rank` has not brought `tensors`.
    pub(super) fn new(rank: usize, tensors: Vec<String>, is_exact: bool) -> MissingTensors {
        MissingTensors { rank, is_exact: is_exact || tensors.len() == 1, tensors }
    }

    pub(crate) fn list(missing: &[MissingTensors]) -> String {
        missing.iter().map(ToString::to_string).collect::<Vec<_>>().join("; ")
    }
}

impl fmt::Display for MissingTensors {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let MissingTensors { rank, tensors, is_exact } = self;
        let all = if *is_exact { "" } else { "all of " };
        write!(f, "rank {rank} has not brought {all}{}", names(tensors.iter().map(String::as_str)))
    }
}

/// The names in quotes. Only the first ones, if there are many.
pub fn names<'a>(names: impl ExactSizeIterator<Item = &'a str>) -> String {
    let more = names.len().saturating_sub(NAMES_MAX);
    let shown: Vec<String> = names.take(NAMES_MAX).map(|name| format!("`{name}`")).collect();
    match more {
        0 => shown.join(", "),
        _ => format!("{} and {more} more", shown.join(", ")),
    }
}
