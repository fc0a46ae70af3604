//! The failures of a job: what went wrong, which rank is at fault, and the page that explains them.

#![forbid(unsafe_code)]

mod cause;
mod error;
mod origin;
mod section;
mod text;

pub use cause::{Cause, Reason};
pub use error::{Error, ErrorKind, MissingKeys, Result};
pub use origin::ErrorOrigin;
pub use section::Section;
pub use text::spent;
