//! The start-up of a job: ranks meet through a store, on virtual time, before their groups begin.
//!
//! It runs the real server of the store, the code with which real clients wait, and the code with which real
//! ranks start up (`drumline_engine::start_up`). Other programs use the store at the same time: they make
//! arbitrary calls, die in the middle of a call or lose their connections. Strangers send arbitrary bytes.
//! Some start-ups fail because the store or a rank fails. Then there is no job.
//!
//! A sequential model carries out every request in the order in which the server receives it. At
//! every step it is compared with the bytes that the server writes, the connections that the server
//! refuses and the data that the server keeps.

mod action;
mod bystanders;
mod client;
mod connection;
mod mesh;
mod model;
mod rank;
mod scenario;
mod script;
mod shared_state;
mod simulation;
mod store_process;
mod waiting;

pub(crate) use simulation::{run, run_undisturbed};
