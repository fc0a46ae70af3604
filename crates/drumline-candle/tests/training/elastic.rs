//! `kill -9` of ranks anywhere in a step: the others end it, with the bits of one process.

use std::{cell::Cell, env, fs, path::Path, process::Stdio, thread, time::Duration};

use drumline::{Config, ProcessGroup, init_process_group};
use drumline_testing::{eventually, itself};

use crate::{killed::Rank, shards::train_telling};

const OUT: &str = "TEST_ELASTIC_OUT";
const RANK: &str = "TEST_ELASTIC_RANK";
const RANKS: &str = "TEST_ELASTIC_RANKS";
const DIES: &str = "TEST_ELASTIC_DIES";
const SHARDS: usize = 6;

/// At which of the places that its training reaches a rank is killed.
#[derive(Clone, Copy, Debug)]
struct Death {
    rank: usize,
    place: usize,
    /// After which it is killed there. `None`: it goes no further.
    within: Option<Duration>,
}

/// A rank, in a process of its own.
#[test]
#[ignore = "other tests start it"]
fn rank() {
    let Some(out) = env::var_os(OUT) else { return };
    let out = Path::new(&out);
    let [rank, ranks] = [RANK, RANKS].map(|name| env::var(name).unwrap());
    let dies: Option<(usize, bool)> = env::var(DIES).ok().map(|it| {
        let (place, stays) = it.split_once(' ').unwrap();
        (place.parse().unwrap(), stays == "stays")
    });
    let mut config = Config::default();
    config.min_ranks = Some(1);
    let store = out.join("store");
    let url = format!("file://{}?rank={rank}&world_size={ranks}", store.display());
    let group = init_process_group(&url, &config).unwrap();
    let places = Cell::new(0);
    let trained = train_telling(&group, SHARDS, || {
        let place = places.replace(places.get() + 1);
        if let Some((at, stays)) = dies
            && at == place
        {
            fs::write(out.join(format!("reached-{rank}")), "").unwrap();
            if stays {
                thread::sleep(Duration::MAX); // it is killed here
            }
        }
    });
    fs::write(out.join(format!("trained-{rank}")), format!("{:?}", trained.unwrap())).unwrap();
}

fn goes_on_with_the_bits_of_one_process(ranks: usize, deaths: &[Death]) {
    let temporary = tempfile::tempdir().unwrap();
    let out = temporary.path();
    let start = |rank: usize| {
        let mut command = itself("elastic::rank");
        command.env(OUT, out).env(RANK, rank.to_string()).env(RANKS, ranks.to_string());
        if let Some(death) = deaths.iter().find(|it| it.rank == rank) {
            let stays = if death.within.is_none() { "stays" } else { "goes on" };
            command.env(DIES, format!("{} {stays}", death.place));
        }
        Rank(command.stdout(Stdio::null()).spawn().unwrap())
    };
    let mut processes: Vec<Rank> = (0..ranks).map(start).collect();
    for death in deaths {
        let reached = out.join(format!("reached-{}", death.rank));
        eventually("a rank to come to the place of its death", || reached.exists());
        thread::sleep(death.within.unwrap_or_default());
        processes[death.rank].0.kill().ok(); // SIGKILL
    }
    let alone = train_telling(&ProcessGroup::alone(), SHARDS, || ()).unwrap();
    for (rank, process) in processes.iter_mut().enumerate() {
        eventually("a rank to end", || process.has_ended());
        let is_killed = deaths.iter().any(|it| it.rank == rank);
        let trained = fs::read_to_string(out.join(format!("trained-{rank}"))).ok();
        // A rank that was killed too late has them, too.
        if !is_killed || trained.is_some() {
            assert_eq!(trained, Some(format!("{alone:?}")), "rank {rank} after {deaths:?}");
        }
    }
}

#[test]
fn a_step_goes_on_without_ranks_that_are_killed() {
    let at = |rank, place| Death { rank, place, within: None };
    // The first step finds out what is trained. Place 3 is between two steps, if a rank has three shards.
    for (ranks, deaths) in [
        (2, &[at(0, 0)][..]),
        (2, &[at(1, 3)]),
        (3, &[at(0, 4), at(2, 7)]),
        (4, &[at(1, 1), at(0, 6), at(3, 11)]),
    ] {
        goes_on_with_the_bits_of_one_process(ranks, deaths);
    }
}

#[test]
fn a_rank_may_be_killed_at_any_moment() {
    let mut random = 7_u64;
    for ranks in [2, 3, 4, 3] {
        random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        let (rank, place) = ((random >> 60) as usize % ranks, (random >> 50) as usize % 8);
        let within = Some(Duration::from_micros((random >> 30) % 2_000));
        goes_on_with_the_bits_of_one_process(ranks, &[Death { rank, place, within }]);
    }
}
