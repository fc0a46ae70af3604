use std::fmt;

/// How the values of all ranks become one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
#[repr(u8)]
pub enum ReduceOp {
    /// The sum. Integers wrap.
    Sum = 1,
    /// The sum divided by the number of ranks. Integers round towards zero.
    Avg = 2,
    /// The smallest value. A NaN wins.
    Min = 3,
    /// The largest value. A NaN wins.
    Max = 4,
}

impl ReduceOp {
    /// Its name in messages: `sum` and so on.
    pub const fn name(self) -> &'static str {
        match self {
            ReduceOp::Sum => "sum",
            ReduceOp::Avg => "avg",
            ReduceOp::Min => "min",
            ReduceOp::Max => "max",
        }
    }
}

impl fmt::Display for ReduceOp {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}
