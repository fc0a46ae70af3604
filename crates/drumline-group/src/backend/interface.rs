//! The interface of a backend, and what the library passes to it.

use std::{any::Any, fmt, sync::Arc, time::Instant};

use drumline_engine::{Cause, CollectiveError};
use drumline_schedule::{Collective, step::Rank};
use drumline_store::store::Store;

use super::{
    guard::{Guard, Guards},
    message::{Arrived, Outgoing, Wanted},
    request::Request,
};
use crate::{Config, DType, Error};

/// One rank's end of one group.
///
/// Collectives come one after another, in the order of the calls. Sends and receives come from other threads
/// beside them. Every call has a deadline and must return soon after it. After an error the group is
/// poisoned, and only [`Backend::abort`] is called.
///
/// If a method panics, its call fails with [`Cause::Panicked`], and no other group is harmed. When the last handle of a
/// group is dropped, the backend is dropped, too: if it was not shut down, it takes leave of its peers then.
///
/// ```
/// # use drumline_group as drumline;
/// use std::{sync::Arc, time::Instant};
///
/// use drumline::{
///     Cause, CollectiveError, Config, ProcessGroup,
///     backend::{Backend, Request, register_backend},
/// };
///
/// /// Groups of one rank: what a rank gets is what it brings.
/// #[derive(Debug)]
/// struct Alone;
///
/// impl Backend for Alone {
///     fn collective(&self, request: &mut Request<'_>) -> Result<(), Cause> {
///         if !request.input.is_empty() {
///             request.data.copy_from_slice(request.input);
///         }
///         Ok(())
///     }
///
///     fn abort(&self, _: &CollectiveError) {}
///
///     fn shutdown(&self, _: Instant) -> Result<(), Cause> {
///         Ok(())
///     }
/// }
///
/// register_backend("alone", |_| Ok(Arc::new(Alone)))?;
/// let config = Config::default().backend("alone");
/// let group = ProcessGroup::local_world_with(1, &config)?.remove(0);
/// let mut gathered = [0; 2];
/// group.all_gather(&[3, 4], &mut gathered)?;
/// assert_eq!(gathered, [3, 4]);
/// # Ok::<_, drumline::Error>(())
/// ```
pub trait Backend: fmt::Debug + Send + Sync {
    /// Carries out one collective. The table of [`Request`] says what the buffers hold.
    ///
    /// ```
    /// # use drumline_group as drumline;
    /// # mod common {
    /// #     include!(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/common/carried_by.rs"));
    /// # }
    /// # use common::carried_by;
    /// use drumline::{Cause, Collective, backend::Request};
    ///
    /// /// Carries out the calls of a backend.
    /// fn collective(request: &mut Request<'_>) -> Result<(), Cause> {
    ///     match request.call.collective() {
    ///         Collective::Barrier => Ok(()),
    ///         other => Err(Cause::Backend { problem: format!("it has no {}", other.name()) }),
    ///     }
    /// }
    /// # for group in carried_by(collective, 1)? {
    /// group.barrier()?;
    /// let error = group.broadcast(&mut [1_u8], 0).unwrap_err().to_string();
    /// assert!(error.contains("the backend says: it has no broadcast"), "{error}");
    /// # }
    /// # Ok::<_, drumline::Error>(())
    /// ```
    ///
    /// # Errors
    ///
    /// The cause with the rank at fault: [`Cause::PeerExited`], [`Cause::Mismatch`], [`Cause::Timeout`] and
    /// so on; [`Cause::Backend`] for anything else.
    fn collective(&self, request: &mut Request<'_>) -> Result<(), Cause>;

    /// Whether this backend can carry out a collective on elements of this type, with this operator if it has
    /// one: `sum`, `premul_sum`, or the name of a custom operator. The answer must be the same on all ranks.
    /// Unless overridden, a backend supports everything.
    ///
    /// The library refuses an unsupported call before any rank hears of it, and the group goes on.
    ///
    /// ```
    /// # use drumline_group as drumline;
    /// use drumline::{Collective, DType};
    ///
    /// /// Of a backend that knows no scans of complex numbers.
    /// fn supports(collective: Collective, dtype: DType) -> bool {
    ///     !collective.name().contains("scan") || !dtype.name().starts_with("complex")
    /// }
    /// for collective in Collective::ALL {
    ///     assert!(supports(collective, DType::F32));
    /// }
    /// ```
    fn supports(&self, collective: Collective, dtype: DType, operator: Option<&str>) -> bool {
        let _ = (collective, dtype, operator);
        true
    }

    /// Whether [`Backend::send`] and [`Backend::recv`] are implemented.
    ///
    /// ```
    /// # use drumline_group as drumline;
    /// # mod common {
    /// #     include!(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/common/carried_by.rs"));
    /// # }
    /// # use common::carried_by;
    /// use drumline::{Cause, backend::Request};
    ///
    /// /// Carries out the calls of a backend.
    /// fn collective(request: &mut Request<'_>) -> Result<(), Cause> {
    ///     Ok(()) // and no messages, as nothing else is said
    /// }
    /// # for group in carried_by(collective, 1)? {
    /// let error = group.send(&[1_u8], 0, 7).unwrap_err().to_string();
    /// assert_eq!(error, r#"send: backend "example" carries no messages from rank to rank [errors.md#argument]"#);
    /// # }
    /// # Ok::<_, drumline::Error>(())
    /// ```
    fn has_messages(&self) -> bool {
        false
    }

    /// Sends a message. May return as soon as it no longer needs the bytes.
    ///
    /// ```
    /// # use drumline_group as drumline;
    /// use std::{collections::VecDeque, sync::Mutex, time::Instant};
    ///
    /// use drumline::{
    ///     Cause, CollectiveError,
    ///     backend::{Arrived, Backend, Outgoing, Request, Wanted},
    /// };
    ///
    /// /// Carries messages of a rank to itself.
    /// #[derive(Debug, Default)]
    /// struct Mirror(Mutex<VecDeque<(u64, Arrived)>>);
    ///
    /// impl Backend for Mirror {
    ///     fn has_messages(&self) -> bool {
    ///         true
    ///     }
    ///
    ///     fn send(&self, message: &Outgoing<'_>) -> Result<(), Cause> {
    ///         let bytes = message.bytes.to_vec();
    ///         let arrived = Arrived { from: message.to, label: message.label, bytes };
    ///         self.0.lock().unwrap().push_back((message.tag, arrived));
    ///         Ok(())
    ///     }
    ///
    ///     fn recv(&self, wanted: &Wanted) -> Result<Arrived, Cause> {
    ///         let mut messages = self.0.lock().unwrap();
    ///         let at = messages.iter().position(|(tag, _)| *tag == wanted.tag);
    ///         let problem = || Cause::Backend { problem: "nothing was sent".to_owned() };
    ///         at.and_then(|at| messages.remove(at)).map(|(_, message)| message).ok_or_else(problem)
    ///     }
    /// #
    /// #   fn collective(&self, _: &mut Request<'_>) -> Result<(), Cause> {
    /// #       Ok(())
    /// #   }
    /// #   fn abort(&self, _: &CollectiveError) {}
    /// #   fn shutdown(&self, _: Instant) -> Result<(), Cause> {
    /// #       Ok(())
    /// #   }
    /// }
    /// # use std::sync::Arc;
    /// # drumline::register_backend("mirror", |_| Ok(Arc::new(Mirror::default())))?;
    /// # let config = drumline::Config::default().backend("mirror");
    /// # let group = drumline::ProcessGroup::local_world_with(1, &config)?.remove(0);
    /// # group.send(&[1_u8, 2], 0, 7)?;
    /// # let mut received = [0_u8; 2];
    /// # group.recv(&mut received, 0, 7)?;
    /// # assert_eq!(received, [1, 2]);
    /// # Ok::<_, drumline::Error>(())
    /// ```
    ///
    /// # Errors
    ///
    /// As for [`Backend::collective`].
    fn send(&self, message: &Outgoing<'_>) -> Result<(), Cause> {
        let _ = message;
        Err(Cause::Backend { problem: NO_MESSAGES.to_owned() })
    }

    /// Waits for a message. Messages of one rank with one tag come in the order in which they were sent.
    /// Messages that no call has asked for yet must not hold up others.
    ///
    /// ```
    /// # use drumline_group as drumline;
    /// # use std::{sync::Arc, time::Instant};
    /// # use drumline::{CollectiveError, Config, ProcessGroup};
    /// # use drumline::backend::{Request, register_backend};
    /// use drumline::{Cause, backend::{Arrived, Backend, Wanted}};
    ///
    /// /// A backend to which nothing ever comes.
    /// #[derive(Debug)]
    /// struct Deaf;
    ///
    /// impl Backend for Deaf {
    ///     fn has_messages(&self) -> bool {
    ///         true
    ///     }
    ///
    ///     fn recv(&self, wanted: &Wanted) -> Result<Arrived, Cause> {
    ///         // When `wanted.deadline` has passed: who has not sent.
    ///         Err(Cause::Timeout { waiting_for: wanted.from.into_iter().collect() })
    ///     }
    /// #
    /// #   fn collective(&self, _: &mut Request<'_>) -> Result<(), Cause> {
    /// #       Ok(())
    /// #   }
    /// #   fn abort(&self, _: &CollectiveError) {}
    /// #   fn shutdown(&self, _: Instant) -> Result<(), Cause> {
    /// #       Ok(())
    /// #   }
    /// }
    /// # register_backend("deaf", |_| Ok(Arc::new(Deaf)))?;
    /// # let config = Config::default().backend("deaf");
    /// # let group = ProcessGroup::local_world_with(1, &config)?.remove(0);
    /// let error = group.recv(&mut [0_u8], 0, 7).unwrap_err().to_string();
    /// assert!(error.contains("without an answer from rank 0"), "{error}");
    /// # Ok::<_, drumline::Error>(())
    /// ```
    ///
    /// # Errors
    ///
    /// As for [`Backend::collective`].
    fn recv(&self, wanted: &Wanted) -> Result<Arrived, Cause> {
        let _ = wanted;
        Err(Cause::Backend { problem: NO_MESSAGES.to_owned() })
    }

    /// What carries calls on the memory of devices, if this backend has such a thing: an `Arc<dyn Fabric>` of
    /// `drumline-device`. Without it, the library copies the data of devices through pinned memory of the host, and calls
    /// [`Backend::collective`].
    fn on_device(&self) -> Option<Arc<dyn Any + Send + Sync>> {
        None
    }

    /// The group has failed on this rank. Tells the peers why, and makes calls that are under way return.
    /// Does not wait.
    ///
    /// ```
    /// # use drumline_group as drumline;
    /// # use std::{sync::Arc, time::Instant};
    /// # use drumline::{CollectiveError, Config, ProcessGroup};
    /// # use drumline::backend::{Request, register_backend};
    /// use std::sync::Mutex;
    ///
    /// use drumline::{Cause, backend::Backend};
    ///
    /// #[derive(Debug, Default)]
    /// struct Line(Mutex<Vec<String>>);
    ///
    /// impl Backend for Line {
    ///     fn abort(&self, failure: &CollectiveError) {
    ///         self.0.lock().unwrap().push(failure.cause.to_string()); // for all peers
    ///     }
    /// #
    /// #   fn collective(&self, _: &mut Request<'_>) -> Result<(), Cause> {
    /// #       Ok(())
    /// #   }
    /// #   fn shutdown(&self, _: Instant) -> Result<(), Cause> {
    /// #       Ok(())
    /// #   }
    /// }
    /// # let line = Arc::new(Line::default());
    /// # let lent = line.clone();
    /// # register_backend("line", move |_| Ok(lent.clone()))?;
    /// # let config = Config::default().backend("line");
    /// # let group = ProcessGroup::local_world_with(1, &config)?.remove(0);
    /// group.abort();
    /// assert_eq!(line.0.lock().unwrap()[..], ["this rank has aborted the group"]);
    /// # Ok::<_, drumline::Error>(())
    /// ```
    fn abort(&self, failure: &CollectiveError);

    /// Waits until all ranks have called this. No other call follows.
    ///
    /// ```
    /// # use drumline_group as drumline;
    /// # use std::{sync::Arc, time::Instant};
    /// # use drumline::{CollectiveError, Config, ProcessGroup};
    /// # use drumline::backend::{Request, register_backend};
    /// use drumline::{Cause, backend::Backend};
    ///
    /// #[derive(Debug)]
    /// struct Unwilling;
    ///
    /// impl Backend for Unwilling {
    ///     fn shutdown(&self, deadline: Instant) -> Result<(), Cause> {
    ///         assert!(deadline > Instant::now()); // until then it waits for the others
    ///         Err(Cause::PeerExited { peer: 0 })
    ///     }
    /// #
    /// #   fn collective(&self, _: &mut Request<'_>) -> Result<(), Cause> {
    /// #       Ok(())
    /// #   }
    /// #   fn abort(&self, _: &CollectiveError) {}
    /// }
    /// # register_backend("unwilling", |_| Ok(Arc::new(Unwilling)))?;
    /// # let config = Config::default().backend("unwilling");
    /// # let group = ProcessGroup::local_world_with(1, &config)?.remove(0);
    /// let error = group.destroy().unwrap_err().to_string();
    /// assert!(error.contains("the process of rank 0 has ended"), "{error}");
    /// # Ok::<_, drumline::Error>(())
    /// ```
    ///
    /// # Errors
    ///
    /// As for [`Backend::collective`].
    fn shutdown(&self, deadline: Instant) -> Result<(), Cause>;
}

const NO_MESSAGES: &str = "it carries no messages from rank to rank";

/// What a backend is made from. A factory gets it once for every group and rank.
///
/// ```
/// # use drumline_group as drumline;
/// use drumline::{Config, ProcessGroup, backend::{BackendOptions, register_backend}};
///
/// register_backend("meeting", |options: &BackendOptions| {
///     // Each rank says where it listens, and hears where its neighbour does.
///     let key = |rank| format!("address/{rank}");
///     options.store.set(&key(options.rank), format!("port {}", options.rank).as_bytes())?;
///     let neighbour = options.store.get(&key((options.rank + 1) % options.world_size))?;
///     let neighbour = String::from_utf8_lossy(&neighbour).into_owned();
///     Err(options.error(format!("it cannot connect to {neighbour}")))
/// })?;
/// let config = Config::default().backend("meeting");
/// let error = ProcessGroup::local_world_with(2, &config).unwrap_err().to_string();
/// assert!(error.contains("rank 0: it cannot connect to port 1"), "{error}");
/// # Ok::<_, drumline::Error>(())
/// ```
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct BackendOptions {
    /// A part of the job's store that only the ranks of this group know, and that no earlier group has used.
    /// All ranks have met there.
    pub store: Arc<dyn Store>,
    /// Name of the group, for errors.
    pub name: String,
    /// This process's number in the group.
    pub rank: Rank,
    /// The number of ranks in the group.
    pub world_size: usize,
    /// The time by which all ranks must be connected.
    pub deadline: Instant,
    /// The settings of the group.
    pub config: Config,
    pub(super) guards: Arc<dyn Guards>,
}

impl BackendOptions {
    /// Why this rank could not be connected.
    ///
    /// ```
    /// # use drumline_group as drumline;
    /// use drumline::{Config, ProcessGroup, backend::register_backend};
    ///
    /// register_backend("fabric", |options| Err(options.error("no fabric here".to_owned())))?;
    /// let config = Config::default().backend("fabric");
    /// let error = ProcessGroup::local_world_with(1, &config).unwrap_err().to_string();
    /// assert_eq!(error, r#"group "local", rank 0: no fabric here [errors.md#start-up]"#);
    /// # Ok::<_, drumline::Error>(())
    /// ```
    pub fn error(&self, problem: String) -> Error {
        Error::Connect { group: self.name.clone(), rank: self.rank, problem, culprit: None }
    }

    /// A guard for a backend that does not notice dead, late and failed ranks itself. If one rank's factory
    /// asks, those of all ranks must. Asked again, it gives the same guard.
    ///
    /// ```
    /// # use drumline_group as drumline;
    /// # use drumline::CollectiveError;
    /// use std::{sync::{Arc, mpsc}, time::Instant};
    ///
    /// use drumline::{
    ///     Cause, Config, ProcessGroup,
    ///     backend::{Backend, Guard, Request, register_backend},
    /// };
    ///
    /// /// Waits for something that never comes, and asks nobody but its guard.
    /// #[derive(Debug)]
    /// struct Patient(Guard);
    ///
    /// impl Backend for Patient {
    ///     fn collective(&self, _: &mut Request<'_>) -> Result<(), Cause> {
    ///         loop {
    ///             self.0.check()?;
    ///             std::thread::yield_now();
    ///         }
    ///     }
    /// #
    /// #   fn abort(&self, _: &CollectiveError) {}
    /// #   fn shutdown(&self, _: Instant) -> Result<(), Cause> {
    /// #       Ok(())
    /// #   }
    /// }
    ///
    /// register_backend("patient", |options| Ok(Arc::new(Patient(options.guard()?))))?;
    /// let config = Config::default().backend("patient");
    /// std::thread::scope(|threads| {
    ///     for group in ProcessGroup::local_world_with(2, &config)? {
    ///         threads.spawn(move || {
    ///             let root = group.rank(); // ranks disagree
    ///             let error = group.broadcast(&mut [1_u8], root).unwrap_err().to_string();
    ///             for call in ["#0 broadcast(root 0) of 1 u8", "#0 broadcast(root 1) of 1 u8"] {
    ///                 assert!(error.contains(call), "{error}");
    ///             }
    ///         });
    ///     }
    ///     Ok::<_, drumline::Error>(())
    /// })?;
    /// # Ok::<_, drumline::Error>(())
    /// ```
    ///
    /// # Errors
    ///
    /// [`Error::Connect`] when the ranks cannot be connected in time.
    pub fn guard(&self) -> Result<Guard, Error> {
        self.guards.guard()
    }
}
