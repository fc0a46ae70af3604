use super::apart;
use super::row::Algorithm;
use super::table::ALGORITHMS;
use crate::collective::Collective;
use crate::error::Error;
use crate::flush;
use crate::schedule::Schedule;
use crate::step::{Rank, Step};
use crate::topology::Topology;

impl Algorithm {
    /// The row of [`ALGORITHMS`] with this name.
    ///
    /// # Errors
    ///
    /// [`Error::UnknownAlgorithm`] lists the known names.
    pub fn find(collective: Collective, name: &str) -> Result<&'static Algorithm, Error> {
        let mut rows = ALGORITHMS.iter().filter(|row| row.collective == collective);
        rows.clone().find(|row| row.name == name).ok_or_else(|| Error::UnknownAlgorithm {
            collective,
            name: name.to_owned(),
            known: rows.by_ref().map(|row| row.name).collect(),
        })
    }

    /// The schedule of `rank`. A collective without a root ignores `root`, which must be a rank.
    ///
    /// # Errors
    ///
    /// When `rank` or `root` is not in the topology, or the algorithm does not serve the topology.
    pub fn schedule(&self, topology: &Topology, rank: Rank, root: Rank) -> Result<Schedule, Error> {
        self.schedule_of(topology, rank, root, |steps| steps)
    }

    /// The schedule of `rank` for elements that are narrower than their sums. An algorithm whose sums can lie
    /// [apart](Algorithm::sums_apart) keeps them in [`Buffer::Sum`](crate::step::Buffer::Sum). All others have one
    /// schedule for all elements.
    ///
    /// # Errors
    ///
    /// As for [`Algorithm::schedule`].
    pub fn narrow_schedule(
        &self,
        topology: &Topology,
        rank: Rank,
        root: Rank,
    ) -> Result<Schedule, Error> {
        self.schedule_of(topology, rank, root, |steps| match self.sums_apart {
            true => apart::sums(self, topology, root, rank, steps),
            false => steps,
        })
    }

    fn schedule_of(
        &self,
        topology: &Topology,
        rank: Rank,
        root: Rank,
        place: impl FnOnce(Vec<Step>) -> Vec<Step>,
    ) -> Result<Schedule, Error> {
        let world_size = topology.world_size;
        if rank >= world_size {
            return Err(Error::RankOutOfRange { rank, world_size });
        }
        if root >= world_size {
            return Err(Error::RootOutOfRange { root, world_size });
        }
        if !(self.applies)(topology) {
            return Err(self.does_not_apply(topology));
        }
        let steps = place((self.generate)(topology, rank, root));
        let steps = flush::insert(self.collective, steps);
        Ok(Schedule {
            collective: self.collective,
            algorithm: self.name,
            world_size,
            rank,
            root,
            memory: self.memory,
            uneven: self.uneven,
            lags: (self.lags)(topology, rank, &steps),
            shelves: (self.shelves)(topology, rank),
            slot_parts: self.slot_parts,
            steps,
        })
    }

    /// The schedules of all ranks, in the order of ranks.
    ///
    /// # Errors
    ///
    /// As for [`Algorithm::schedule`].
    pub fn schedules(&self, topology: &Topology, root: Rank) -> Result<Vec<Schedule>, Error> {
        (0..topology.world_size).map(|rank| self.schedule(topology, rank, root)).collect()
    }

    /// The same for elements that are narrower than their sums.
    ///
    /// # Errors
    ///
    /// As for [`Algorithm::schedule`].
    pub fn narrow_schedules(
        &self,
        topology: &Topology,
        root: Rank,
    ) -> Result<Vec<Schedule>, Error> {
        (0..topology.world_size).map(|rank| self.narrow_schedule(topology, rank, root)).collect()
    }

    fn does_not_apply(&self, topology: &Topology) -> Error {
        let rows = ALGORITHMS.iter().filter(|row| row.collective == self.collective);
        Error::DoesNotApply {
            collective: self.collective,
            algorithm: self.name,
            needs: self.needs,
            world_size: topology.world_size,
            others: rows.filter(|row| (row.applies)(topology)).map(|row| row.name).collect(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::algorithm::DIRECT_MAX_RANKS;

    #[test]
    fn names_are_unique_and_found() {
        for row in ALGORITHMS {
            let found = Algorithm::find(row.collective, row.name).unwrap();
            assert!(std::ptr::eq(row, found), "{} {}", row.collective, row.name);
        }
    }

    #[test]
    fn an_unknown_name_is_told_the_known_ones() {
        let error = Algorithm::find(Collective::Broadcast, "ring").unwrap_err();
        assert_eq!(
            error.to_string(),
            r#"broadcast has no algorithm "ring": use one of binomial, shm, hierarchical, hierarchical-chain, hierarchical-leaders, shm-push"#
        );
    }

    #[test]
    fn ranks_outside_the_world_are_refused() {
        let row = Algorithm::find(Collective::Broadcast, "binomial").unwrap();
        let world = Topology::flat(4);
        assert_eq!(
            row.schedule(&world, 4, 0),
            Err(Error::RankOutOfRange { rank: 4, world_size: 4 })
        );
        assert_eq!(
            row.schedule(&world, 0, 4),
            Err(Error::RootOutOfRange { root: 4, world_size: 4 })
        );
        assert!(row.schedule(&Topology::flat(0), 0, 0).is_err());
    }

    #[test]
    fn worlds_that_an_algorithm_does_not_serve_are_refused() {
        let direct = Algorithm::find(Collective::AllReduce, "direct").unwrap();
        assert!(direct.schedule(&Topology::flat(DIRECT_MAX_RANKS), 0, 0).is_ok());
        assert!(direct.needs.contains(&DIRECT_MAX_RANKS.to_string()));
        let error = direct.schedule(&Topology::flat(DIRECT_MAX_RANKS + 1), 0, 0).unwrap_err();
        assert_eq!(
            error.to_string(),
            "the algorithm direct of all_reduce does not serve these 257 ranks: it needs at most 256 \
             ranks, summed in their order; use one of halving, doubling, gather, binomial, \
             hierarchical-halving, hierarchical-halving-push"
        );
    }
}
