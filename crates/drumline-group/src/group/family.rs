//! What a group shares with the groups that are made from it.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::{
        Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak,
        atomic::{AtomicU64, Ordering},
    },
    thread,
    time::Duration,
};

use drumline_engine::{
    membership::{Membership, Seen, SeenFailure},
    start_up::{claim::process_key, watch::Processes},
};
use drumline_schedule::step::Rank;
use drumline_shm::PerProcess;
use drumline_store::store::Store;

use crate::{Error, ErrorKind, rendezvous::Rendezvous};

/// What this process has seen in groups that were made apart from each other, as torch makes them. It is kept by the rank's
/// number in the job, because ranks may be threads.
static SEEN: PerProcess<Mutex<BTreeMap<Rank, Weak<Seen>>>> = PerProcess::new();

/// A group's hold on its family, until the group is destroyed.
pub(super) type FamilyCell = Arc<Mutex<Option<Arc<Family>>>>;

/// The place where the ranks of a job meet. It lives as long as any group of the job.
#[derive(Debug)]
pub(super) struct Family {
    /// The name of the group of all ranks.
    pub(super) root: String,
    pub(super) store: Arc<dyn Store>,
    /// Set if the ranks have met by a URL. Rank 0 may host the store for the others.
    rendezvous: Option<Rendezvous>,
    /// The names of the groups that this rank is joining now.
    joining: Mutex<BTreeSet<String>>,
    /// See [`Membership::seen`].
    pub(super) seen: Arc<Seen>,
    /// What the keys of the life begin with in which all ranks have met. Set once they have.
    place: OnceLock<String>,
    /// The ranks of which this one has written there.
    told: Mutex<BTreeSet<Rank>>,
    /// How many lines of groups there are.
    lines: AtomicU64,
}

impl Family {
    pub(super) fn new(root: &str, store: Arc<dyn Store>) -> Family {
        Family {
            root: root.to_owned(),
            store,
            rendezvous: None,
            joining: Mutex::default(),
            seen: Arc::default(),
            place: OnceLock::new(),
            told: Mutex::default(),
            lines: AtomicU64::new(0),
        }
    }

    /// That of a job. From now on this process ends with its lease.
    pub(super) fn of(root: &str, rendezvous: Rendezvous) -> Arc<Family> {
        Family::with(root, rendezvous, Arc::default())
    }

    fn with(root: &str, rendezvous: Rendezvous, seen: Arc<Seen>) -> Arc<Family> {
        let watched = drumline_shm::end_with_lease();
        drop(watched.inspect_err(|error| tracing::warn!(%error, "nobody watches the lease")));
        let store = rendezvous.store.clone();
        Arc::new(Family { rendezvous: Some(rendezvous), seen, ..Family::new(root, store) })
    }

    /// The family of one group of a job that was formed elsewhere. This rank has the number `own` in the job. All its groups
    /// of this kind that live at the same time share what it has seen.
    pub(super) fn of_one(root: &str, rendezvous: Rendezvous, own: Rank) -> Arc<Family> {
        let mut all = SEEN.get(Mutex::default).lock().unwrap_or_else(PoisonError::into_inner);
        let seen = all.get(&own).and_then(Weak::upgrade).unwrap_or_default();
        all.insert(own, Arc::downgrade(&seen));
        Family::with(root, rendezvous, seen)
    }

    /// The processes of the members of a group of the family.
    pub(super) fn processes(&self, member: &Membership) -> Processes {
        let key = |rank| process_key(&self.root, member.global.of(rank));
        let keys = (0..member.world_size).map(key).collect();
        Processes { keys, join: member.name == self.root, stay: self.is_launchers() }
    }

    /// All ranks have met in a life whose keys begin with `prefix`.
    pub(super) fn have_met(&self, prefix: &str) {
        let _ = self.place.set(prefix.to_owned());
    }

    /// What keys begin with that only the ranks of this job know.
    pub(super) fn place(&self) -> &str {
        self.place.get().map_or(&self.root, String::as_str)
    }

    /// The number of a new line of groups.
    pub(super) fn next_line(&self) -> u64 {
        self.lines.fetch_add(1, Ordering::Relaxed)
    }

    /// The key under which the members of the group of all ranks find who has ended, once they have met.
    fn lost_key(&self) -> Option<String> {
        self.place.get().map(|prefix| format!("{prefix}/lost"))
    }

    /// This rank could not make a group. If it leaves its other groups for that, their ranks must hear whom to blame.
    pub(super) fn note(&self, error: &Error) {
        if error.kind() == ErrorKind::Connect {
            let failure = SeenFailure { culprit: error.culprit(), text: error.to_string() };
            self.seen.note(failure, None);
        }
    }

    /// Tells ranks that make groups that `rank`, by its number in the job, has ended. They may have no connection to it,
    /// nor to this rank in a group that has failed.
    pub(super) fn tell_of(&self, rank: Rank) {
        let Some(key) = self.lost_key() else { return };
        if !self.told.lock().unwrap_or_else(PoisonError::into_inner).insert(rank) {
            return;
        }
        // The store may be slow, and the caller has failed already.
        let store = self.store.clone();
        let tell = move || drop(store.append(&key, format!(" {rank}").as_bytes()));
        let telling = thread::Builder::new().name("drumline-tell".to_owned()).spawn(tell);
        drop(telling.inspect_err(|error| tracing::debug!(%error, "nobody hears of rank {rank}")));
    }

    /// The ranks, by their numbers in the job, of which others have told that they have ended.
    pub(super) fn lost(&self) -> Vec<Rank> {
        let Some(key) = self.lost_key() else { return Vec::new() };
        let told = match self.store.check(&[&key]) {
            Ok(true) => self.store.get(&key).unwrap_or_default(),
            // Who has lost the store hears that from its own requests.
            Ok(false) | Err(_) => Vec::new(),
        };
        let told = String::from_utf8_lossy(&told).into_owned();
        told.split(' ').filter_map(|rank| rank.parse().ok()).collect()
    }

    /// This rank destroys or leaves the last group of the family: nobody waits for this process any more.
    pub(super) fn forget(self: Arc<Self>, member: &Membership) {
        let is_last = Arc::strong_count(&self) <= 2; // the group's and this one
        if is_last && !self.is_launchers() {
            let _ = self.store.delete_key(&process_key(&self.root, member.global.of(member.rank)));
        }
    }

    fn is_launchers(&self) -> bool {
        self.rendezvous.as_ref().is_some_and(Rendezvous::is_launchers)
    }

    /// Drops a group's hold on the family. The last group leaves the place where the ranks have met: see
    /// [`Rendezvous::leave`].
    pub(super) fn leave(self: Arc<Family>, patience: Duration) {
        let Some(Family { rendezvous, store, .. }) = Arc::into_inner(self) else { return };
        drop(store);
        if let Some(rendezvous) = rendezvous {
            rendezvous.leave(patience);
        }
    }

    /// Marks that this rank is joining a group of that name, until the mark is dropped. `None`: another
    /// thread is joining it.
    pub(super) fn begin_to_join(&self, name: &str) -> Option<Joining<'_>> {
        let is_new = self.joining().insert(name.to_owned());
        is_new.then(|| Joining { family: self, name: name.to_owned() })
    }

    fn joining(&self) -> MutexGuard<'_, BTreeSet<String>> {
        self.joining.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// See [`Family::begin_to_join`].
#[derive(Debug)]
pub(super) struct Joining<'a> {
    family: &'a Family,
    name: String,
}

impl Drop for Joining<'_> {
    fn drop(&mut self) {
        self.family.joining().remove(&self.name);
    }
}
