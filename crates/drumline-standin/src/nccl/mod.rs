//! NCCL on streams of the stand-in.
//!
//! | file | what |
//! |---|---|
//! | `functions.rs` | the C functions |
//! | `groups.rs` | calls between ncclGroupStart and ncclGroupEnd, and how calls are launched |
//! | `exchange.rs` | an operation on a stream: what it sends, and what it does with what it gets |
//! | `communicator.rs` | communicators: how ranks meet, part and give up |
//! | `mail.rs` | messages between ranks, over sockets of the host |
//! | `sums.rs`, `kinds.rs` | arithmetic; types, operators and result codes |

pub(crate) mod communicator;
mod exchange;
mod functions;
mod groups;
mod kinds;
mod mail;
mod sums;
