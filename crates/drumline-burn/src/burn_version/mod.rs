//! What of burn may change with its version. A port to another version begins here.
//!
//! Three kinds of things stand here: what burn 0.23 changes, names from within burn's backends, and what burn does
//! without saying so. What burn documents for its users is used where it is needed. Each item says what 0.23.0-pre.1
//! does to it. The notes (`docs/notes/burn-0.23.md`) say what else 0.23 changes.

pub(crate) mod backend;
#[cfg(feature = "train")]
pub(crate) mod events;
#[cfg(feature = "gpu")]
pub(crate) mod gpu;
#[cfg(feature = "train")]
pub(crate) mod silent;

use burn::tensor::{AllocationProperty, Bytes};

/// How burn names the container of a reparameterization to visitors of a module. It visits one right after the
/// parameter to which it belongs.
///
/// 0.23 does the same. The test of a model that is wrapped twice would notice another name.
pub(crate) const REPARAMETERIZATION: &str = "Reparameterization";

/// Bytes for burn without a copy. burn copies them if it writes to them.
///
/// 0.23 has the same call. It is an addition of cubecl's, which the documentation of burn does not mention.
pub(crate) fn shared(bytes: bytes::Bytes) -> Bytes {
    Bytes::from_shared(bytes, AllocationProperty::Other)
}
