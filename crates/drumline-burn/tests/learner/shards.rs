//! Trainings whose steps are shards: one result on any number of ranks, also if some of them die.

use std::{
    env, fs,
    path::Path,
    process::{self, Stdio},
    sync::Arc,
    thread,
    time::Duration,
};

use burn::{
    data::dataloader::DataLoader,
    lr_scheduler::linear::LinearLrSchedulerConfig,
    optim::AdamWConfig,
    train::{
        Learner, SupervisedTraining,
        checkpoint::{
            Checkpoint, Checkpointer, CheckpointerError, FileCheckpointer, KeepLastNCheckpoints,
        },
        metric::LossMetric,
    },
};
use drumline::ProcessGroup;
use drumline_burn::{
    DdpOptions, DistributedDataParallel, data::DataLoaderBuilder, distribute, newest_epoch,
    parameters_digest,
};
use drumline_testing::{eventually, itself};
use tempfile::TempDir;

use crate::{
    network::{Batch, Network, Notes, Samples, Stack, ends_early},
    processes::{Rank, meet},
    training::{device, error, on_ranks},
};

/// How a rank trains.
#[derive(Clone)]
struct Program {
    shards: Option<usize>,
    of_loader: Option<usize>,
    /// With what the model is wrapped, if it is.
    wraps: Option<DdpOptions>,
    epochs: usize,
    accumulation: Option<usize>,
    samples: Samples,
    /// After how many batches the loader ends.
    batches: usize,
    /// In which call of `TrainStep::step` this rank asks to stop.
    stops: Option<usize>,
    /// Whether the process ends while it writes the last checkpoint.
    dies_saving: bool,
    notes: Notes,
}

/// Writes burn's files.
struct Files {
    files: FileCheckpointer,
    /// In which epoch the process ends before it has written them.
    dies_in: Option<usize>,
}

impl<R: Checkpoint> Checkpointer<R> for Files {
    fn save(&self, epoch: usize, record: R) -> Result<(), CheckpointerError> {
        if self.dies_in == Some(epoch) {
            // By then the epoch is over for the other ranks.
            thread::sleep(Duration::from_millis(500));
            process::abort();
        }
        self.files.save(epoch, record)
    }

    fn delete(&self, epoch: usize) -> Result<(), CheckpointerError> {
        Checkpointer::<R>::delete(&self.files, epoch)
    }

    fn restore(&self, epoch: usize) -> Result<R, CheckpointerError> {
        self.files.restore(epoch)
    }
}

/// What a rank has at the end: the digest of its parameters, and the size of its world.
type End = (u64, usize);

impl Program {
    fn new(shards: usize) -> Self {
        Self {
            shards: Some(shards),
            of_loader: Some(shards),
            wraps: None,
            epochs: 2,
            accumulation: None,
            samples: Samples::new(0..50),
            batches: usize::MAX,
            stops: None,
            dies_saving: false,
            notes: Notes::default(),
        }
    }

    fn wrapped(shards: usize) -> Self {
        let options = DdpOptions::default().first_bucket_bytes(1).bucket_bytes(64);
        Self { wraps: Some(options.shards(shards)), ..Self::new(shards) }
    }

    fn loader(&self, group: &ProcessGroup) -> Arc<dyn DataLoader<Batch>> {
        let builder = DataLoaderBuilder::new(Stack).batch_size(3).shuffle(5).num_workers(1);
        let builder = self.of_loader.into_iter().fold(builder, DataLoaderBuilder::shards);
        let loader = builder.build(self.samples.clone(), group).unwrap();
        if self.batches == usize::MAX { loader } else { ends_early(loader, self.batches) }
    }

    fn run(self, group: &ProcessGroup, directory: &Path) -> Result<End, String> {
        let valid = Samples::new(9000..9006).loader(4, 0);
        let dies_in = self.dies_saving.then_some(self.epochs);
        let files = |name| {
            let files = FileCheckpointer::new(directory.join("checkpoint"), name);
            Files { files, dies_in: dies_in.filter(|_| name == "model") }
        };
        let mut training = SupervisedTraining::new(directory, self.loader(group), valid)
            .num_epochs(self.epochs)
            .metric_train_numeric(LossMetric::new())
            .metric_valid_numeric(LossMetric::new())
            .with_custom_checkpointers(files("model"), files("optim"), files("scheduler"))
            // To delete a file would wait for one that is being written.
            .with_checkpointing_strategy(KeepLastNCheckpoints::new(9))
            .with_application_logger(None);
        let (mut notes, interrupter) = (self.notes, training.interrupter());
        if let Some(last) = self.stops {
            notes = notes.at_step(move |step| {
                if step == last {
                    interrupter.stop(Some("enough"));
                }
            });
        }
        if let Some(steps) = self.accumulation {
            training = training.grads_accumulation(steps);
        }
        if let Some(epoch) = newest_epoch(directory, group).unwrap() {
            training = training.checkpoint(epoch);
        }
        let model = Network::new(1 + group.rank(), 8, notes, &device());
        let schedule = LinearLrSchedulerConfig::new(0.05, 0.001, 90).init().unwrap();
        let learner = |model| Learner::new(model, AdamWConfig::new().init(), schedule);
        let mut training = distribute(training, group);
        if let Some(shards) = self.shards {
            training = training.shards(shards);
        }
        let (elastic, result);
        if let Some(options) = self.wraps {
            let (ddp, model) = DistributedDataParallel::wrap_with(model, group, &options).unwrap();
            training = training.wrapped(&ddp);
            elastic = training.elastic();
            result = training.launch(learner(model));
        } else {
            elastic = training.elastic();
            result = training.launch(learner(model));
        }
        if result.error.is_some() {
            return Err(error(&result));
        }
        let world_size = elastic.group().world_size();
        elastic.close().unwrap();
        Ok((parameters_digest(&result.model).unwrap(), world_size))
    }
}

/// What one process ends with, and how it differs from the begin.
fn alone(program: Program) -> u64 {
    let directory = TempDir::new().unwrap();
    program.run(&ProcessGroup::alone(), directory.path()).unwrap().0
}

#[test]
fn any_number_of_ranks_gives_the_same_bits() {
    for shards in [4, 6] {
        let one = alone(Program::new(shards));
        for program in [Program::new(shards), Program::wrapped(shards)] {
            for ranks in 1..=4 {
                let directory = TempDir::new().unwrap();
                let notes = Notes::default();
                let ends = on_ranks(ranks, |group| {
                    let own = if group.rank() == 0 { notes.clone() } else { Notes::default() };
                    Program { notes: own, ..program.clone() }.run(&group, directory.path()).unwrap()
                });
                assert_eq!(ends, vec![(one, ranks); ranks], "{shards} shards, {ranks} ranks");
                assert_eq!(
                    newest_epoch(directory.path(), &ProcessGroup::alone()).unwrap(),
                    Some(2)
                );
                let steps = 50_usize.div_ceil(shards).div_ceil(3);
                assert_eq!(notes.rates().len(), 2 * steps);
                assert_eq!(notes.losses().len(), 2 * steps * shards.div_ceil(ranks));
                assert_eq!(notes.validated(), 2 * 6);
            }
        }
    }
    // It would notice a difference.
    assert_ne!(alone(Program::new(4)), alone(Program::new(6)));
    assert_ne!(alone(Program { epochs: 1, ..Program::new(4) }), alone(Program::new(4)));
}

#[test]
fn another_number_of_ranks_resumes() {
    let (directory, copies) = (TempDir::new().unwrap(), TempDir::new().unwrap());
    let run = |ranks: usize, epochs: usize, directory: &Path| {
        let program = Program { epochs, ..Program::new(6) };
        on_ranks(ranks, |group| program.clone().run(&group, directory).unwrap().0)[0]
    };
    // burn names parameters by numbers of chance, so all go on from one epoch.
    run(3, 1, directory.path());
    let of = |ranks: usize| {
        let copy = copies.path().join(ranks.to_string());
        crate::resumed::copy(directory.path(), &copy);
        run(ranks, 2, &copy)
    };
    let all = [1, 2, 4].map(of);
    assert_eq!(all, [alone(Program::new(6)); 3]);
}

#[test]
fn a_rank_that_asks_to_stop_stops_all_after_the_same_step() {
    let directory = TempDir::new().unwrap();
    let ends = on_ranks(3, |group| {
        let notes = Notes::default();
        // The first of two shards in the second step. It is told in the third.
        let stops = Some(3).filter(|_| group.rank() == 1);
        let program = Program { stops, notes: notes.clone(), ..Program::wrapped(6) };
        let (digest, _) = program.run(&group, directory.path()).unwrap();
        (digest, notes.rates().len())
    });
    assert_eq!(ends, [ends[0]; 3]);
    assert_eq!(ends[0].1, 3, "of 6 updates");
}

/// What all ranks say to programs that cannot train. The program of each rank has a number.
fn refused(ranks: usize, program: impl Fn(usize) -> Program + Sync) -> Vec<String> {
    on_ranks(ranks, |group| {
        let directory = TempDir::new().unwrap();
        let program = program(group.rank());
        let notes = program.notes.clone();
        let error = program.run(&group, directory.path()).unwrap_err();
        assert!(notes.rates().is_empty(), "an update was made: {error}");
        error
    })
}

#[test]
fn what_does_not_fit_shards_is_named_on_all_ranks() {
    type Case = (fn(usize) -> Program, &'static str);
    let cases: [Case; 8] = [
        (
            |_| Program { shards: Some(2), of_loader: None, ..Program::new(2) },
            "2 shards are too few for 3 ranks",
        ),
        (
            |_| Program { shards: Some(100_000), of_loader: None, ..Program::new(2) },
            "does not deal its samples to the 100000 shards",
        ),
        (
            |rank| Program { shards: Some(6).filter(|_| rank != 1), ..Program::new(6) },
            "on rank 1: shards is none, but rank 0 has 6",
        ),
        (
            |_| Program { of_loader: None, ..Program::new(6) },
            "does not deal its samples to the 6 shards of a step; build it with",
        ),
        (
            |_| Program { of_loader: Some(5), ..Program::new(6) },
            "deals its samples to 5 shards, but a step has 6",
        ),
        (
            |_| Program { accumulation: Some(2), ..Program::new(6) },
            "`grads_accumulation(2)` has no place beside shards",
        ),
        (
            |_| Program { wraps: Some(DdpOptions::default()), ..Program::new(6) },
            "the model was wrapped for no shards, and a step is to have 6",
        ),
        (
            |_| Program { wraps: Some(DdpOptions::default().shards(4)), ..Program::new(6) },
            "the model was wrapped for 4 shards, and a step is to have 6",
        ),
    ];
    for (program, expected) in cases {
        for error in refused(3, program) {
            assert!(error.contains(expected), "{error}");
        }
    }
}

#[test]
fn data_that_a_rank_cannot_read_end_the_step_on_all_ranks() {
    let unreadable = |rank: usize| {
        let mut program = Program::new(3);
        program.samples.unreadable = (rank == 1).then_some(17);
        // All other samples are alike, so every rank asks for its own.
        program.samples.numbers = vec![17; 50];
        program
    };
    let errors = refused(3, unreadable);
    assert!(errors[1].contains("cannot read data: "), "{errors:?}");
    assert!(errors[1].contains("sample 17 is unreadable"), "{errors:?}");
    for told in [&errors[0], &errors[2]] {
        assert!(told.contains("the step failed in the program on rank 1"), "{told}");
    }
    for error in refused(2, |rank| Program {
        batches: if rank == 0 { 1 } else { usize::MAX },
        ..Program::new(4)
    }) {
        let own = error.contains("has ended within step 1 of 5 of an epoch");
        assert!(own || error.contains("the step failed in the program on rank 0"), "{error}");
    }
}

const DIRECTORY: &str = "LEARNER_SHARDS_DIRECTORY";
const RANK: &str = "LEARNER_SHARDS_RANK";
const DIES: &str = "LEARNER_SHARDS_DIES";
const RANKS: usize = 4;

fn survives() -> Program {
    Program { epochs: 4, ..Program::wrapped(8) }
}

/// A rank, in a process of its own. It may die in a step, or where it validates.
#[test]
#[ignore = "other tests start it"]
fn rank() {
    let (Some(directory), Ok(rank)) = (env::var_os(DIRECTORY), env::var(RANK)) else { return };
    let directory = Path::new(&directory);
    let group = meet(directory, &rank, RANKS);
    let mut program = survives();
    program.notes = match env::var(DIES).as_deref() {
        Ok("saves") => {
            program.dies_saving = true;
            program.notes
        }
        Ok("validates") => program.notes.at_validation(|| process::abort()),
        Ok(step) => {
            let last: usize = step.parse().unwrap();
            let die = move |step| {
                if step == last {
                    process::abort()
                }
            };
            program.notes.at_step(die)
        }
        Err(_) => program.notes,
    };
    let end = program.run(&group, &directory.join("run"));
    fs::write(directory.join(format!("end-{rank}")), format!("{end:?}")).unwrap();
}

#[test]
fn ranks_that_die_cost_no_step_and_no_bit() {
    let one = alone(survives());
    // An epoch has 3 steps, and a rank at first two shards in each.
    let cases: [&[(usize, &str)]; 7] = [
        &[(2, "1")],
        &[(0, "8")],
        &[(3, "24")],
        &[(0, "validates")],
        &[(0, "saves")],
        &[(1, "7"), (2, "7")],
        &[(0, "5"), (1, "18")],
    ];
    for deaths in cases {
        let directory = TempDir::new().unwrap();
        let of = |rank: usize| deaths.iter().find(|(it, _)| *it == rank).map(|(_, when)| *when);
        let start = |rank: usize| {
            let mut command = itself("shards::rank");
            command.env(DIRECTORY, directory.path()).env(RANK, rank.to_string());
            command.envs(of(rank).map(|when| (DIES, when)));
            Rank(command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap())
        };
        for (rank, mut process) in (0..RANKS).map(start).collect::<Vec<_>>().into_iter().enumerate()
        {
            eventually("the rank to end", || process.0.try_wait().unwrap().is_some());
            let dies = of(rank).is_some();
            assert_eq!(process.0.wait().unwrap().success(), !dies, "rank {rank} of {deaths:?}");
            if !dies {
                let end = fs::read_to_string(directory.path().join(format!("end-{rank}"))).unwrap();
                let expected = Ok::<End, String>((one, RANKS - deaths.len()));
                assert_eq!(end, format!("{expected:?}"), "rank {rank} of {deaths:?}");
            }
        }
        // What rank 0 does was done to the end.
        let run = directory.path().join("run");
        assert_eq!(newest_epoch(&run, &ProcessGroup::alone()).unwrap(), Some(4), "{deaths:?}");
        for split in ["train", "valid"] {
            assert!(run.join(split).join("epoch-4/Loss.log").exists(), "{split}, {deaths:?}");
        }
    }
}
