//! Which algorithms carry a call, in which order they add, and what decides between them.

pub use drumline_engine::explain::{Candidate, Explanation};
pub use drumline_schedule::{Rounding, SumOrder, price::PriceList};

pub use crate::{
    group::{explain, shares_memory},
    prices::PriceSource,
};
