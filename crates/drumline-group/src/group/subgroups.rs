//! Groups of some of a group's ranks.

use std::time::Duration;

use drumline_engine::membership::{GlobalRanks, list};
use drumline_schedule::step::Rank;

use super::ProcessGroup;
use crate::{Config, Error, Result, error::not_a_member};

/// How a group of some ranks differs from the group that it is made from.
///
/// ```
/// # use drumline_group as drumline;
/// use std::time::Duration;
///
/// use drumline::GroupOptions;
///
/// let options = GroupOptions::default().name("evaluation").timeout(Duration::from_secs(60));
/// assert!(options.config.is_none());
/// ```
#[derive(Clone, Debug, Default)]
#[non_exhaustive]
pub struct GroupOptions {
    /// Tells groups of the same ranks apart. Only needed when threads of one rank make such groups at the same time.
    pub name: Option<String>,
    /// How long start-up and every call may take. Unless set, as in the group that it is made from.
    pub timeout: Option<Duration>,
    /// Settings to use instead of those of the group that it is made from. If they have no secret, or name no
    /// addresses, that group's are used.
    pub config: Option<Config>,
    /// Whether ranks are numbered in the order in which they are listed, instead of in ascending order.
    pub keep_order: bool,
}

impl GroupOptions {
    /// Sets [`GroupOptions::name`].
    #[must_use]
    pub fn name(mut self, name: impl Into<String>) -> Self {
        self.name = Some(name.into());
        self
    }

    /// Sets [`GroupOptions::timeout`].
    #[must_use]
    pub fn timeout(mut self, timeout: Duration) -> Self {
        self.timeout = Some(timeout);
        self
    }

    /// Sets [`GroupOptions::config`].
    #[must_use]
    pub fn config(mut self, config: Config) -> Self {
        self.config = Some(config);
        self
    }

    /// Sets [`GroupOptions::keep_order`].
    #[must_use]
    pub fn keep_order(mut self) -> Self {
        self.keep_order = true;
        self
    }
}

impl ProcessGroup {
    /// Connects some of this group's ranks to a group of their own.
    ///
    /// `ranks` are numbers in this group. Only the members call this, with the same list; the other ranks go
    /// on with their work. The new group numbers its members from 0, in ascending order unless
    /// [`GroupOptions::keep_order`] says otherwise. It has connections, memory and failures of its own. So
    /// both groups may be used at the same time and in any order, and may be destroyed in any order.
    ///
    /// The call blocks until all members have called. If groups have several members in common, these members
    /// must make the groups in the same order, or each group on its own thread.
    ///
    /// # Errors
    ///
    /// [`NotAMember`](crate::ErrorKind::NotAMember) on a rank that is not listed; it has not contacted any rank.
    /// [`Argument`](crate::ErrorKind::Argument) when a rank does not exist or is listed twice. Otherwise as for
    /// [`crate::rendezvous::connect`]; the error names members that do not come in time, and what they do instead.
    /// If this group fails while the call waits for a member, the call ends with that failure, and this group is
    /// poisoned. A failed attempt leaves nothing behind and may be repeated.
    pub fn new_group(&self, ranks: &[Rank], options: &GroupOptions) -> Result<ProcessGroup> {
        let mut ranks = ranks.to_vec();
        self.check_members("new_group", &ranks)?;
        if !options.keep_order {
            ranks.sort_unstable();
        }
        let global: Vec<Rank> =
            ranks.iter().map(|&rank| self.inner.member.global.of(rank)).collect();
        let family = self.inner.family().ok_or_else(|| {
            Error::argument("new_group", format!("group {:?} has been destroyed", self.name()))
        })?;
        let label = options.name.as_ref().map(|name| format!("/{name}")).unwrap_or_default();
        let name = format!("{}{label}[{}]", family.root, list(&global));
        let Some(rank) = ranks.iter().position(|&rank| rank == self.rank()) else {
            return Err(not_a_member(&name, self.global_rank_of(self.rank())));
        };
        let joining = family.begin_to_join(&name).ok_or_else(|| {
            Error::argument(
                "new_group",
                format!(
                    "another thread is joining group {name:?}: give the two groups names \
                 (GroupOptions::name) to tell them apart"
                ),
            )
        })?;
        let config = self.config_for(options);
        let size = ranks.len();
        let group = ProcessGroup::join(
            family.clone(),
            &name,
            (rank, size),
            GlobalRanks::new(global),
            &config,
            self.origin(),
        );
        drop(joining);
        group.inspect_err(|error| family.note(error))
    }

    /// Divides this group by colour. Ranks that pass the same `color` form a group, in which they are
    /// numbered by `key`, and ranks with the same key by their rank in this group. All ranks must call this.
    /// A rank that passes no colour gets no group.
    ///
    /// # Errors
    ///
    /// As for [`ProcessGroup::all_gather`] and [`ProcessGroup::new_group`].
    pub fn split(
        &self,
        color: Option<u64>,
        key: i64,
        options: &GroupOptions,
    ) -> Result<Option<ProcessGroup>> {
        let own = [u64::from(color.is_some()), color.unwrap_or_default(), key.cast_unsigned()];
        let mut all = vec![0; own.len() * self.world_size()];
        self.all_gather(&own, &mut all)?;
        if color.is_none() {
            return Ok(None);
        }
        let same = all.chunks_exact(own.len()).enumerate().filter(|(_, it)| it[..2] == own[..2]);
        let mut ranks: Vec<(i64, Rank)> =
            same.map(|(rank, it)| (it[2].cast_signed(), rank)).collect();
        ranks.sort_unstable();
        let ranks: Vec<Rank> = ranks.into_iter().map(|(_, rank)| rank).collect();
        self.new_group(&ranks, &options.clone().keep_order()).map(Some)
    }

    /// The numbers in the whole job of the group's ranks, in order of their rank in the group.
    pub fn ranks(&self) -> Vec<Rank> {
        (0..self.world_size()).map(|rank| self.global_rank_of(rank)).collect()
    }

    /// The rank in this group of the job's rank `global`, if it is a member.
    pub(super) fn group_rank(&self, global: Rank) -> Option<Rank> {
        self.inner.member.global.position(global, self.world_size())
    }

    fn global_rank_of(&self, rank: Rank) -> Rank {
        self.inner.member.global.of(rank)
    }

    fn config_for(&self, options: &GroupOptions) -> Config {
        let ours = &self.inner.config;
        let mut config = options.config.as_ref().unwrap_or(ours).clone();
        config.secret = config.secret.or_else(|| ours.secret.clone());
        if config.bind_addresses.is_empty() && config.socket_ifname.is_none() {
            // These were found on the way to the master, and are not searched again.
            config.bind_addresses.clone_from(&ours.bind_addresses);
        }
        config.timeout = options.timeout.unwrap_or(config.timeout);
        config
    }

    fn check_members(&self, operation: &'static str, ranks: &[Rank]) -> Result<()> {
        let mut seen = vec![false; self.world_size()];
        for &rank in ranks {
            self.check_rank(operation, rank)?;
            if std::mem::replace(&mut seen[rank], true) {
                let problem = format!("rank {rank} is listed twice");
                return Err(Error::argument(operation, problem));
            }
        }
        Ok(())
    }
}
