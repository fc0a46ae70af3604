//! The symbolic checker: proves an algorithm right for one world size, root and length.
//!
//! All ranks run against each other on expressions instead of numbers. Element 7 of rank 2 is
//! the symbol `r2[7]`, and adding it to what rank 3 has gives the expression `r2[7] + r3[7]`, which
//! differs from `r3[7] + r2[7]` and from `r2[7] + r3[8]`. So a result is right when it is the
//! expected expression, for every number that could have been there.
//!
//! What [`check`] makes sure of:
//!
//! - **Result.** A sum is the canonical [`tree`](crate::tree) over all ranks (of a scan, over those
//!   up to the own), finished once at its root; a broadcast is the root's data; block `i` of an
//!   all-gather is what rank `i` gave; data that gets no result stays as it was; no rank leaves a
//!   barrier that another has not entered.
//! - **Messages.** Each send meets a receive of the same length in the same operation.
//! - **No deadlock**, on transports where a message leaves its source only when the receiver
//!   takes it. The error lists who waits for whom.
//! - **No torn read.** A source is left alone from its `Send` to a `Flush` that covers it.
//! - **No race.** Two accesses to an element of shared memory, one of them a write, are ordered by
//!   steps, messages, posts and waits, or the rule of entry (see [`step`](crate::step)). The user
//!   counts: it writes registered data before each operation and reads it after. Every rank keeps a
//!   vector clock for this, so a race is found whether or not it changes the result.
//! - **No stale memory.** The operation runs three times back to back on fresh symbols. Before
//!   each, the users overwrite their buffers, and scratch holds nothing that may be read. Slots
//!   are used in turn, and between two ranks of a host exchanged.
//! - **Cost.** Rounds, messages and elements (sent, combined, shared) equal the algorithm's own
//!   formula.
//! - **Leaves and results only** go from rank to rank, where the algorithm says that no partial sum
//!   does.
//! - **Form.** What an executor relies on; see [`Rule`].
//!
//! One run suffices, since no step depends on timing: receives name their sender, messages
//! from one rank arrive in the order in which they were sent, and posts are only counted.
//!
//! ```
//! use drumline_schedule::step::{Loc, Side, Span, Step};
//! use drumline_inspect::check;
//! use drumline_schedule::{Algorithm, Collective, Cost, Topology};
//!
//! // Swap and add. Correct, until the peer reads what has been added to already.
//! let hasty = Algorithm::new(
//!     Collective::AllReduce,
//!     "hasty",
//!     |_, rank, _| {
//!         let (peer, data) = (1 - rank, Loc::data(Span::WHOLE));
//!         let side = if peer < rank { Side::Left } else { Side::Right };
//!         vec![
//!             Step::Send { to: peer, src: data },
//!             Step::RecvReduce { from: peer, dst: data, side, finish: true },
//!         ]
//!     },
//!     |_, _, n| Cost { rounds: 1, messages: 1, elements: n, combined: n, ..Cost::default() },
//! )
//! .only_where(|topology| topology.world_size == 2, "2 ranks");
//! let error = check::check(&hasty, &Topology::flat(2), 0, 10).unwrap_err();
//! assert_eq!(error.to_string(), "\
//! deadlock:
//!   rank 0 waits for rank 1 at step 1: flush   until rank 1 has taken message 1
//!   rank 1 waits for rank 0 at step 1: flush   until rank 0 has taken message 1");
//! ```

mod error;
mod expressions;
mod form;
mod races;
mod rule;
mod run;
mod symbols;

pub use error::{CheckError, Wait};
pub(crate) use form::check_form;
pub use races::{Access, Race};
pub use rule::Rule;
pub use run::{check, check_schedules, check_uneven};
