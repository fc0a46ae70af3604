//! Why a call failed.

mod collective;
mod one_line;

pub use collective::CollectiveError;
pub(crate) use collective::limit_of;
pub use drumline_error::{Cause, Error, ErrorKind, Reason, Result};
pub(crate) use one_line::one_line;
