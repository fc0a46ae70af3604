//! Ranks that die within a step, and the others, which end it.

use std::sync::atomic::{AtomicUsize, Ordering};

use drumline_group::{Config, DType, Error, ErrorKind, ProcessGroup, ReduceOp};
use drumline_train::{
    ElasticGroup,
    ddp::{DdpOptions, GradientReducer, ParameterSpec},
    local,
};

use crate::common::{everywhere, world_with};

const SHARDS: usize = 8;
const STEPS: u64 = 6;

/// Where in a step a rank dies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Moment {
    Before,
    /// When it has handed in half of its gradients.
    Within,
    /// When it has the averages, and the others may lack them.
    After,
}

/// Which ranks die, each in a step and at a moment there.
type Deaths = [(usize, u64, Moment)];

/// An error that says that this rank is to die now.
fn dies() -> Error {
    Error::io("die", std::io::ErrorKind::Interrupted)
}

/// Trains two parameters, and returns them with the losses. `None` on a rank that dies: it drops its group.
fn train(group: &ProcessGroup, deaths: &Deaths) -> Option<(Vec<f32>, Vec<f64>)> {
    let specs = [3, 5].map(|elements| ParameterSpec::new("p", [elements], DType::F32));
    let options = DdpOptions::default().first_bucket_bytes(1).bucket_bytes(16).shards(SHARDS);
    let elastic = ElasticGroup::new(group);
    let reducer = GradientReducer::new(specs.into(), &options, group).unwrap();
    let (mut parameters, mut losses) = ([vec![0.5_f32; 3], vec![0.25; 5]], Vec::new());
    let own = group.rank();
    for number in 0..STEPS {
        let is_time = |moment| deaths.contains(&(own, number, moment));
        let before = reducer.steps_before();
        let stepped = elastic.run(|group| {
            reducer.regroup(group, before)?;
            if is_time(Moment::Before) {
                return Err(dies());
            }
            let shards = reducer.shards().unwrap();
            let mut losses = Vec::new();
            for shard in shards.clone() {
                for (at, values) in parameters.iter().enumerate() {
                    if at == 1 && shard == shards.start && is_time(Moment::Within) {
                        return Err(dies());
                    }
                    let of = |value: f32| (value * 3.1 + shard as f32 * 0.7 + number as f32).sin();
                    let gradient: Vec<f32> = values.iter().map(|value| of(*value)).collect();
                    match shard + 1 == shards.end {
                        true => reducer.submit(at, gradient[..].into()),
                        false => {
                            reducer.accumulate(at, |place| place.copy_from(gradient[..].into()))
                        }
                    }
                }
                if shard + 1 < shards.end {
                    reducer.end_shard();
                }
                losses.push((f64::from(parameters[0][0]) + shard as f64).cos());
            }
            let (averaged, loss) = reducer.finish_shards(number, &losses)?;
            if is_time(Moment::After) {
                return Err(dies());
            }
            Ok([0, 1].map(|at| averaged.get::<f32>(at).unwrap().to_vec())).map(|it| (it, loss))
        });
        let (averages, loss) = match stepped {
            Ok(stepped) => stepped,
            Err(error) if error.kind() == ErrorKind::Io => return None,
            Err(error) => panic!("rank {own} in step {number}: {error}"),
        };
        for (values, averages) in parameters.iter_mut().zip(averages) {
            values.iter_mut().zip(averages).for_each(|(value, average)| *value -= 0.1 * average);
        }
        losses.push(loss);
    }
    elastic.close().unwrap();
    Some((parameters.concat(), losses))
}

fn bits((parameters, losses): &(Vec<f32>, Vec<f64>)) -> Vec<u64> {
    let parameters = parameters.iter().map(|it| u64::from(it.to_bits()));
    parameters.chain(losses.iter().map(|it| it.to_bits())).collect()
}

fn at_least(min_ranks: usize, config: &Config) -> Config {
    let mut config = config.clone();
    config.min_ranks = Some(min_ranks);
    config
}

#[test]
fn steps_go_on_without_ranks_that_die_with_the_bits_of_one_process() {
    use Moment::{After, Before, Within};
    let alone = bits(&train(&ProcessGroup::alone(), &[]).unwrap());
    let test = |ranks: usize, config: &Config, deaths: &Deaths| {
        let trained = world_with(
            ranks,
            &at_least(1, config).timeout(std::time::Duration::from_secs(20)),
            |group| {
                let rank = group.rank();
                (rank, train(&group, deaths))
            },
        );
        for (rank, trained) in trained {
            let dies = deaths.iter().any(|(it, ..)| *it == rank);
            let expected = (!dies).then(|| alone.clone());
            assert_eq!(trained.as_ref().map(bits), expected, "rank {rank} after {deaths:?}");
        }
    };
    everywhere(|config| {
        for moment in [Before, Within, After] {
            test(2, config, &[(0, 2, moment)]);
            test(3, config, &[(1, 0, moment)]);
            // In the last step, and in one in which buckets are planned anew.
            test(4, config, &[(3, STEPS - 1, moment), (0, 1, moment)]);
        }
        // One after the other until one is left.
        test(4, config, &[(2, 1, Within), (0, 2, After), (3, 4, Before)]);
    });
}

#[test]
fn pieces_run_again_on_the_ranks_that_are_left() {
    let tries = AtomicUsize::new(0);
    let sums = world_with(3, &Config::default(), |group| {
        let elastic = ElasticGroup::new(&group);
        let own = group.rank();
        drop(group);
        let sum = elastic.run(|group| {
            tries.fetch_add(1, Ordering::Relaxed);
            if own == 1 {
                return Err(dies());
            }
            let mut sum = [own as f32];
            group.all_reduce(&mut sum, ReduceOp::Sum)?;
            Ok((sum[0], group.ranks()))
        });
        let told = (elastic.group().name().to_owned(), elastic.group().ranks());
        (own, sum.ok(), told)
    });
    for (own, sum, (name, ranks)) in sums {
        match own {
            1 => assert_eq!((sum, &name[..]), (None, "local")),
            _ => assert_eq!((sum, ranks), (Some((2.0, vec![0, 2])), vec![0, 2])),
        }
    }
    assert_eq!(tries.into_inner(), 5);
}

#[test]
fn too_few_ranks_are_an_error_that_names_the_dead() {
    let errors = world_with(4, &at_least(3, &Config::default()), |group| {
        let elastic = ElasticGroup::new(&group);
        let own = group.rank();
        drop(group);
        let run = |dies_now: bool| {
            elastic.run(|group| if dies_now { Err(dies()) } else { group.barrier() })
        };
        // Rank 3 goes first: three are enough.
        if run(own == 3).is_err() {
            return None;
        }
        run(own == 1).err().filter(|error| error.kind() != ErrorKind::Io)
    });
    let errors: Vec<_> = errors.into_iter().flatten().collect();
    assert_eq!(errors.len(), 2);
    for error in errors {
        let wanted = "2 ranks are left (0,2), and the job needs 3 to go on (min_ranks, DRUMLINE_MIN_RANKS): ";
        assert!(error.to_string().starts_with(wanted), "{error}");
        assert_eq!(error.culprit(), Some(1));
    }
}

#[test]
fn a_piece_that_fails_while_all_live_is_not_run_again() {
    let tries = AtomicUsize::new(0);
    local(2, |group| {
        let elastic = ElasticGroup::new(&group);
        let failed = elastic.run(|_| {
            tries.fetch_add(1, Ordering::Relaxed);
            Err::<(), _>(Error::argument("the program", "wrong"))
        });
        assert!(failed.unwrap_err().to_string().starts_with("the program: wrong"));
        // Pieces are not nested.
        let nested = elastic.run(|_| elastic.run(|_| Ok::<_, Error>(())));
        assert_eq!(nested.unwrap_err().kind(), ErrorKind::Argument);
        Ok(elastic.close()?)
    })
    .unwrap();
    assert_eq!(tries.into_inner(), 2);
}

#[test]
fn a_rank_that_the_others_have_left_behind_is_told() {
    let config = Config::default().timeout(std::time::Duration::from_secs(3));
    let slow = std::sync::Barrier::new(3);
    let ended = world_with(3, &config, |group| {
        let elastic = ElasticGroup::new(&group);
        let own = group.rank();
        drop(group);
        let piece = |group: &ProcessGroup| {
            let mut sum = [1.0_f32];
            group.all_reduce(&mut sum, ReduceOp::Sum)?;
            Ok::<_, Error>(sum[0])
        };
        if own == 2 {
            slow.wait(); // until the others have gone on
        }
        let ran = elastic.run(piece);
        if own != 2 {
            slow.wait();
        }
        (own, ran.map_err(|error| error.to_string()))
    });
    for (own, ran) in ended {
        match own {
            2 => assert!(ran.clone().unwrap_err().contains("go on without it: 0,1"), "{ran:?}"),
            _ => assert_eq!(ran, Ok(2.0)),
        }
    }
}

#[test]
fn if_the_store_goes_with_a_rank_the_error_names_that_rank() {
    let port = drumline_group::free_port(std::net::Ipv4Addr::LOCALHOST.into(), 0).unwrap();
    let rank = |rank: usize| {
        let url = format!("tcp://127.0.0.1:{port}?rank={rank}&world_size=3");
        let group = drumline_group::init_process_group(&url, &Config::default()).unwrap();
        let elastic = ElasticGroup::new(&group);
        drop(group);
        elastic.run(|group| if group.rank() == 0 { Err(dies()) } else { group.barrier() })
    };
    std::thread::scope(|threads| {
        let ranks: Vec<_> = (0..3).map(|it| threads.spawn(move || rank(it))).collect();
        for ended in ranks.into_iter().skip(1) {
            let error = ended.join().unwrap().unwrap_err();
            assert!(
                error.to_string().contains("the ranks that are left cannot meet: store"),
                "{error}"
            );
            assert_eq!(error.culprit(), Some(0), "{error}");
        }
    });
}
