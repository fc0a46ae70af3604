//! How a job is, for those who ask over HTTP.

use std::{
    fmt::Write,
    time::{Duration, Instant, SystemTime},
};

use serde::Serialize;

use super::happening::Happening;
use crate::{clock::since_1970, world::World};

/// What the launcher of this host knows of its job.
#[derive(Debug)]
pub(crate) struct Status {
    run_id: String,
    began: Instant,
    began_at: SystemTime,
    phase: Phase,
    /// How many worlds have started.
    worlds: u64,
    restarts: u32,
    world: Option<World>,
    ranks: Vec<Rank>,
    /// How many of them have failed, while the others go on.
    lost: usize,
    /// When the launcher last turned to its events.
    beat: Instant,
}

/// A rank of this host.
#[derive(Clone, Copy, Debug, Default)]
struct Rank {
    runs: bool,
    last_step: Option<u64>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
enum Phase {
    /// No ranks have started yet.
    Starting,
    Running,
    /// A rank has failed, and the others are being ended; or the job waits to start again.
    Failed,
    /// A signal ends the job.
    Stopping,
    /// The job has ended.
    Over,
}

/// The launcher turns to its events much more often than this.
const SILENT: Duration = Duration::from_secs(30);

/// The answer to `GET /health`.
#[derive(Serialize)]
struct Health<'a> {
    healthy: bool,
    state: Phase,
    run_id: &'a str,
    ranks_running: usize,
    ranks_lost: usize,
    ranks: usize,
    world_size: usize,
    restarts: u32,
    uptime_s: u64,
}

impl Status {
    pub(crate) fn new(run_id: &str) -> Status {
        let began = Instant::now();
        Status {
            run_id: run_id.to_owned(),
            began,
            began_at: SystemTime::now(),
            phase: Phase::Starting,
            worlds: 0,
            restarts: 0,
            world: None,
            ranks: Vec::new(),
            lost: 0,
            beat: began,
        }
    }

    pub(crate) fn hear(&mut self, happening: &Happening) {
        match happening {
            Happening::WorldStarts(world) => {
                self.phase = Phase::Running;
                self.worlds += 1;
                self.restarts = world.restart;
                self.ranks = vec![Rank::default(); world.local_size];
                self.lost = 0;
                self.world = Some(world.clone());
            }
            Happening::WorkerStarts(worker) => self.set_runs(worker.local_rank, true),
            Happening::WorkerHangs { .. } => self.fail(),
            Happening::WorkerEnds { worker, exit_code, lost, .. } => {
                self.set_runs(worker.local_rank, false);
                self.lost += usize::from(*lost);
                if *exit_code != Some(0) && !lost {
                    self.fail();
                }
            }
            Happening::Stops { .. } => self.phase = Phase::Stopping,
            Happening::JobEnds { .. } => self.phase = Phase::Over,
            Happening::JobBegins { .. } | Happening::WorldEnds { .. } => {}
        }
    }

    /// Hears the last step of each rank of this host.
    pub(crate) fn hear_steps(&mut self, steps: &[Option<u64>]) {
        for (rank, step) in self.ranks.iter_mut().zip(steps) {
            rank.last_step = step.or(rank.last_step);
        }
    }

    pub(crate) fn beat(&mut self) {
        self.beat = Instant::now();
    }

    /// Whether all ranks of this host run.
    pub(crate) fn all_run(&self) -> bool {
        self.ranks.iter().all(|rank| rank.runs)
    }

    /// A line for people.
    pub(crate) fn line(&self) -> String {
        let (running, ranks) = (self.running(), self.ranks.len());
        let again = match self.restarts {
            0 => String::new(),
            restarts => format!(", restart {restarts}"),
        };
        match self.phase {
            Phase::Starting => "starts".into(),
            Phase::Running => format!("{running} of {ranks} ranks of this host run{again}"),
            Phase::Failed => format!("a rank has failed{again}"),
            Phase::Stopping => "is being stopped".into(),
            Phase::Over => "has ended".into(),
        }
    }

    /// Whether all is well, and the answer to `GET /health`.
    pub(crate) fn health(&self) -> (bool, String) {
        let healthy = self.is_healthy();
        let health = Health {
            healthy,
            state: self.phase,
            run_id: &self.run_id,
            ranks_running: self.running(),
            ranks_lost: self.lost,
            ranks: self.ranks.len(),
            world_size: self.world.as_ref().map_or(0, |world| world.size),
            restarts: self.restarts,
            uptime_s: self.began.elapsed().as_secs(),
        };
        (healthy, serde_json::to_string(&health).unwrap_or_default() + "\n")
    }

    /// The answer to `GET /metrics`, in the text format of Prometheus.
    pub(crate) fn metrics(&self) -> String {
        let mut text = String::new();
        let mut metric = |name: &str, help: &str, values: &[(String, f64)]| {
            let kind = if name.ends_with("_total") { "counter" } else { "gauge" };
            let _ = writeln!(text, "# HELP drumline_{name} {help}\n# TYPE drumline_{name} {kind}");
            for (labels, value) in values {
                let _ = writeln!(text, "drumline_{name}{labels} {value}");
            }
        };
        let one = |value: f64| [(String::new(), value)];
        let run_id = escaped(&self.run_id);
        let info = format!("{{run_id=\"{run_id}\",version=\"{}\"}}", env!("CARGO_PKG_VERSION"));
        metric("job_info", "The name of the job, and the version of drumline.", &[(info, 1.0)]);
        let began = since_1970(self.began_at).as_secs_f64();
        let help = "When the launcher started, in seconds since 1970.";
        metric("job_start_time_seconds", help, &one(began));
        let up = self.began.elapsed().as_secs_f64();
        metric("job_uptime_seconds", "For how long the launcher has run.", &one(up));
        let healthy = f64::from(u8::from(self.is_healthy()));
        metric("healthy", "1 if GET /health says 200.", &one(healthy));
        metric("worlds_total", "How many worlds have started.", &one(self.worlds as f64));
        metric("restarts", "How many restarts are used.", &one(f64::from(self.restarts)));
        let world = self.world.as_ref();
        let size = world.map_or(0, |world| world.size);
        metric("world_size", "How many ranks all hosts have.", &one(size as f64));
        let hosts = world.map_or(0, |world| world.hosts);
        metric("hosts", "How many hosts the world has.", &one(hosts as f64));
        let running = self.running() as f64;
        metric("ranks_running", "How many ranks run on this host.", &one(running));
        let lost = "How many ranks of this host have failed, while the others go on.";
        metric("ranks_lost", lost, &one(self.lost as f64));
        let first = world.map_or(0, |world| world.first_rank);
        let each = |value: &dyn Fn(&Rank) -> Option<f64>| -> Vec<(String, f64)> {
            let ranks = (first..).zip(&self.ranks);
            let value = |(rank, it)| Some((format!("{{rank=\"{rank}\"}}"), value(it)?));
            ranks.filter_map(value).collect()
        };
        let runs = each(&|rank| Some(f64::from(u8::from(rank.runs))));
        metric("rank_running", "1 if this rank of this host runs.", &runs);
        let steps = each(&|rank| rank.last_step.map(|step| step as f64));
        metric("rank_last_step", "The last step that this rank has begun.", &steps);
        text
    }

    fn is_healthy(&self) -> bool {
        matches!(self.phase, Phase::Starting | Phase::Running) && self.beat.elapsed() < SILENT
    }

    fn running(&self) -> usize {
        self.ranks.iter().filter(|rank| rank.runs).count()
    }

    fn set_runs(&mut self, place: usize, runs: bool) {
        if let Some(rank) = self.ranks.get_mut(place) {
            rank.runs = runs;
        }
    }

    fn fail(&mut self) {
        if self.phase == Phase::Running {
            self.phase = Phase::Failed;
        }
    }
}

/// The value of a label.
fn escaped(text: &str) -> String {
    text.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n")
}

#[cfg(test)]
mod tests {
    use super::{super::happening::Worker, *};

    fn worker(local_rank: usize) -> Worker {
        Worker { global_rank: 4 + local_rank, local_rank, worker_id: 7 }
    }

    fn status() -> Status {
        let mut status = Status::new("a\"1");
        let world = World {
            attempt: 0,
            restart: 0,
            first_rank: 4,
            local_size: 2,
            size: 6,
            host: 1,
            hosts: 2,
        };
        status.hear(&Happening::WorldStarts(world));
        for local_rank in 0..2 {
            status.hear(&Happening::WorkerStarts(worker(local_rank)));
        }
        status
    }

    /// It is lost if its code is 9.
    fn ends(local_rank: usize, exit_code: Option<i32>) -> Happening {
        let (worker, lost) = (worker(local_rank), exit_code == Some(9));
        Happening::WorkerEnds { worker, exit_code, signal: None, lost }
    }

    #[test]
    fn a_job_is_healthy_until_a_rank_fails_and_again_after_the_restart() {
        let mut status = status();
        assert!(status.health().0);
        status.hear(&ends(0, Some(0)));
        let (healthy, text) = status.health();
        assert!(
            healthy && text.contains("\"ranks_running\":1,\"ranks_lost\":0,\"ranks\":2,"),
            "{text}"
        );
        status.hear(&ends(1, Some(9)));
        assert!(status.health().0 && status.metrics().contains("drumline_ranks_lost 1\n"));
        status.hear(&ends(1, Some(3)));
        let (healthy, text) = status.health();
        assert!(!healthy && text.contains("\"healthy\":false,\"state\":\"failed\""), "{text}");
        assert_eq!(status.line(), "a rank has failed");
        let world = status.world.clone().unwrap();
        status.hear(&Happening::WorldStarts(World { restart: 1, ..world }));
        assert!(status.health().0);
        assert_eq!(status.line(), "0 of 2 ranks of this host run, restart 1");
        status.hear(&Happening::Stops { signal: "SIGTERM".into() });
        assert!(!status.health().0);
    }

    #[test]
    fn metrics_name_the_ranks_of_this_host_by_their_ranks_in_the_job() {
        let mut status = status();
        status.hear_steps(&[Some(17), None]);
        status.hear(&ends(1, None));
        let text = status.metrics();
        let lines: Vec<&str> = text.lines().filter(|line| !line.starts_with('#')).collect();
        for line in [
            "drumline_ranks_running 1",
            "drumline_rank_running{rank=\"4\"} 1",
            "drumline_rank_running{rank=\"5\"} 0",
            "drumline_rank_last_step{rank=\"4\"} 17",
            "drumline_world_size 6",
            "drumline_hosts 2",
            "drumline_worlds_total 1",
            "drumline_healthy 0",
        ] {
            assert!(lines.contains(&line), "{line} is not in {text}");
        }
        assert!(text.contains("drumline_job_info{run_id=\"a\\\"1\",version="), "{text}");
        assert!(!text.contains("last_step{rank=\"5\"}"), "{text}");
    }
}
