//! One of several hosts of a job: the shell around the [`membership`](crate::membership).
//!
//! ```text
//!            signals, exits, output                     a store at the first host, a file, or etcd
//!                     │                                          ▲
//!  workers ◄──► session ◄──── rounds: write, read ────► background thread
//!                     │
//!               membership: decides
//! ```
//!
//! | file | what it does |
//! |---|---|
//! | [`session`] | waits for everything at once, and does what the membership says |
//! | [`background`] | writes to the store and reads from it, on a thread of its own |
//! | [`meeting`] | opens the store |
//! | [`generation`] | tells the jobs apart that have run with one name in one store |
//! | [`keys`] | what the values in the store are called |
//! | [`signed`] | values that only hosts of the job can have written |
//! | [`steps`] | stops the ranks of all hosts before the same step |

mod background;
mod generation;
mod keys;
mod meeting;
mod session;
mod signed;
mod steps;

pub(crate) use session::run;
