//! What the handles of a device group and its watcher share.

use std::fmt;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use drumline_device::{Device, Event, Pinned};
use drumline_error::ErrorKind;
use drumline_group::{Cause, ProcessGroup, Result as HostResult, driving};

use crate::direct::DirectCall;
use crate::ring::Window;
use crate::staged::Staged;
use crate::work::Promise;
use crate::{DeviceOptions, Error, Result};

/// Shared by the handles, the watcher, and what ends calls of the host.
pub(crate) struct Shared {
    /// A group of its own: its calls cannot mix with the user's.
    pub(crate) group: ProcessGroup,
    pub(crate) device: Arc<dyn Device>,
    pub(crate) options: DeviceOptions,
    inbox: Mutex<Inbox>,
    news: Condvar,
}

/// What the watcher has yet to hear.
#[derive(Default)]
pub(crate) struct Inbox {
    pub(crate) calls: Vec<Call>,
    /// Sums that have ended, in their order.
    pub(crate) summed: Vec<(HostResult<()>, Pinned)>,
    /// Agreements of all ranks about calls.
    pub(crate) agreed: Vec<Result<()>>,
    pub(crate) closing: Option<Closing>,
    /// The first failure.
    pub(crate) failed: Option<Error>,
    /// Whether the watcher has not seen something.
    is_new: bool,
}

/// How the group ends.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Closing {
    /// Without the others.
    Drop,
    Destroy,
    Leave(Duration),
}

/// A call that is to be done.
pub(crate) struct Call {
    pub(crate) promise: Promise,
    pub(crate) after: Arc<dyn Event>,
    pub(crate) body: Body,
}

pub(crate) enum Body {
    /// Windows of an all-reduce.
    Windows(Vec<Window>),
    Staged(Box<Staged>),
    /// A call of the devices among themselves.
    Direct(Box<DirectCall>),
}

impl Shared {
    pub(crate) fn new(
        group: ProcessGroup,
        device: Arc<dyn Device>,
        options: DeviceOptions,
    ) -> Arc<Shared> {
        let (inbox, news) = (Mutex::default(), Condvar::new());
        Arc::new(Shared { group, device, options, inbox, news })
    }

    /// Changes the inbox, and wakes the watcher.
    pub(crate) fn tell<R>(&self, change: impl FnOnce(&mut Inbox) -> R) -> R {
        let mut inbox = self.lock();
        let result = change(&mut inbox);
        inbox.is_new = true;
        drop(inbox);
        self.news.notify_all();
        result
    }

    pub(crate) fn has_news(&self) -> bool {
        self.lock().is_new
    }

    /// Takes all that is new out.
    pub(crate) fn read<R>(&self, read: impl FnOnce(&mut Inbox) -> R) -> R {
        let mut inbox = self.lock();
        inbox.is_new = false;
        read(&mut inbox)
    }

    /// Sleeps until there is news, or until the time is over.
    pub(crate) fn sleep(&self, limit: Option<Duration>) {
        let inbox = self.lock();
        let is_quiet = |inbox: &mut Inbox| !inbox.is_new;
        match limit {
            Some(limit) => drop(self.news.wait_timeout_while(inbox, limit, is_quiet)),
            None => drop(self.news.wait_while(inbox, is_quiet)),
        }
    }

    /// How the group ends, if it does, and no call is left to be heard of.
    pub(crate) fn closing(&self) -> Option<Closing> {
        let inbox = self.lock();
        inbox.closing.filter(|_| inbox.calls.is_empty())
    }

    pub(crate) fn failure(&self) -> Option<Error> {
        self.lock().failed.clone()
    }

    /// Everything on this group fails from now on, with the first failure. The other ranks hear of it.
    pub(crate) fn fail(&self, error: Error) {
        let is_first = self.tell(|inbox| {
            let is_first = inbox.failed.is_none();
            inbox.failed.get_or_insert_with(|| error.clone());
            is_first
        });
        if is_first {
            tracing::debug!(%error, "a device group has failed");
            let (operation, problem) = match (error.kind(), error.message().split_once(": ")) {
                (ErrorKind::Device | ErrorKind::Argument, Some(told)) => told,
                _ => ("device", &*error.to_string()),
            };
            driving::fail(&self.group, operation, Cause::Device { problem: problem.to_owned() });
        }
    }

    fn lock(&self) -> MutexGuard<'_, Inbox> {
        self.inbox.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl fmt::Debug for Shared {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Shared")
            .field("group", &self.group)
            .field("device", &self.device)
            .finish_non_exhaustive()
    }
}
