//! The symbolic checker: proves an algorithm right for one world size, root and length.
//!
//! All ranks run against each other on expressions instead of numbers. Element 7 of rank 2 is the symbol
//! `r2[7]`. Added to the symbol of rank 3 it gives the expression `r2[7] + r3[7]`, which differs from
//! `r3[7] + r2[7]` and from `r2[7] + r3[8]`. A result that is the expected expression is right for all
//! numbers.
//!
//! [`check`] proves:
//!
//! - **Result.** A sum is the canonical [`tree`](drumline_schedule::tree) over all ranks, finished
//!   once at its root. A broadcast is the root's data. Block `i` of an
//!   all-gather is the contribution of rank `i`. Data that gets no result stays as it was. No rank leaves a
//!   barrier that another rank has not entered.
//! - **Messages.** Each send meets a receive of the same length in the same call.
//! - **No deadlock**, on transports where a message leaves its source only when the receiver takes it. The
//!   error lists which rank waits for which.
//! - **No torn read.** No step writes a source between its `Send` and a `Flush` that covers it.
//! - **No race.** Steps, messages, posts and waits, or the rule of entry (see
//!   [`step`](drumline_schedule::step)) order any two accesses to an element of shared memory if one of them
//!   writes. That includes the user, who writes registered data before each call and reads it after. Every
//!   rank keeps a vector clock, so the checker finds a race whether or not it changes the result.
//! - **No stale memory.** Three calls run back to back on fresh symbols. Before each call the users overwrite
//!   their buffers, and scratch is unwritten. Ranks use slots in turn; two ranks that are alone on a host
//!   also exchange them.
//! - **Cost.** Rounds, messages and elements (sent, combined, shared) equal the algorithm's own formula.
//! - **No partial sum travels** from rank to rank, where the algorithm says so.
//! - **Sums apart.** Where an algorithm says that incomplete sums can lie apart, its schedule for elements that are
//!   narrower than their sums does the same at the same cost, keeps every incomplete sum in a place for sums, and
//!   nothing else there. So the two ends of a message agree on its width. If hosts round their sums
//!   ([`Rounding::Host`](drumline_schedule::Rounding)), the result is the sum of rounded sums.
//! - **Form.** Every step keeps the rules that an executor relies on; see [`Rule`].
//!
//! One run suffices, because no step depends on timing: receives name their sender, messages from one rank
//! arrive in the order in which it sent them, and posts are only counted.
//!
//! ```
//! use drumline_schedule::step::{Loc, Side, Span, Step};
//! use drumline_inspect::check;
//! use drumline_schedule::{Algorithm, Collective, Cost, Topology};
//!
//! // Swap and add. The peer may read data that has changed already, so a flush waits for it: a deadlock.
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
pub use run::{check, check_narrow_schedules, check_pipeline, check_schedules, check_uneven};
