//! Which hosts run a job together: a state machine without processes, sockets and clocks.
//!
//! Each host has one launcher. The launchers meet in a store. One of them, the leader, writes the [`Plan`]. All follow
//! it, and say in a [`Report`] how far they are.
//!
//! | key | who writes it | value |
//! |---|---|---|
//! | `count` | each host once: `add(1)` gives it its number | a number |
//! | `host/N` | host N, once | [`Host`] |
//! | `report/N` | host N, with each poll | [`Report`] |
//! | `plan` | the leader, by `compare_set` only | [`Plan`] |
//!
//! # How to drive it
//!
//! 1. `add(count, 1)`, write `host/N`, and [`Membership::new`].
//! 2. When [`poll_at`](Membership::poll_at) has come, call [`poll`](Membership::poll). First write its report, then
//!    read the plan and what else the [`Poll`] names. Hand the answers in as [`Event::Polled`]. If the store does not
//!    answer, drop the poll: the next one has all that is needed. There is one poll at a time.
//! 3. Hand in what happens to the workers as [`Event::Local`], and [`Event::Tick`] at
//!    [`deadline`](Membership::deadline).
//! 4. Carry out the [`Action`]s of each event in their order. After [`Action::Rejoin`] or [`Action::End`] there are no
//!    more.
//!
//! **Workers die when the lease does.** [`lease`](Membership::lease) says until when workers of this host may live.
//! Something that goes on when the launcher is stopped must kill them then, and must not start any later. Without
//! this, two worlds could run at once.
//!
//! ```
//! use std::time::Duration;
//!
//! use drumline_launch::{Hosts, Joining, Restarts, membership::*};
//!
//! let terms = Terms {
//!     version: "0.1.0".into(),
//!     run_id: "job".into(),
//!     backend: "file".into(),
//!     hosts: Hosts::default(), // one
//!     restarts: Restarts::default(),
//! };
//! let host = Host {
//!     terms,
//!     node_rank: None,
//!     ranks: 8,
//!     name: "a".into(),
//!     address: "10.0.0.1".into(),
//!     keeps_store: false,
//! };
//! let mut membership = Membership::new(1, host, Timing::of(&Joining::default()));
//! let now = Duration::from_millis(3);
//! let poll = membership.poll(now);
//! // ... the report is written, and the store read: it is empty ...
//! let view = View { count: Some(1), ..View::default() };
//! let actions = membership.handle(now, Event::Polled(view));
//! let Some(Action::WritePlan { expected: None, plan }) = actions.first() else { panic!() };
//! // ... compare_set says that the plan is in the store now ...
//! let actions = membership.handle(now, Event::Planned(*plan.clone()));
//! assert!(actions.iter().any(|it| matches!(it, Action::Start(world) if world.size == 8)));
//! ```

mod actions;
mod codec;
mod events;
mod leader;
mod machine;
mod notes;
mod order;
mod sightings;
#[cfg(test)]
mod tests;
mod timing;
mod values;

pub use self::{
    actions::{Action, End, WorldPlan},
    codec::{BadValue, RANKS_MAX, TEXT_BYTES_MAX, Value},
    events::{Event, Local, Poll, View},
    machine::Membership,
    timing::Timing,
    values::{
        Failure, Held, Host, How, Member, Named, Origin, Outcome, Phase, Plan, Refused, Report,
        State, Terms, Verdict, Why,
    },
};
