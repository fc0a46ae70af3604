//! Requests to any of the servers, until one answers.

use std::{
    collections::BTreeMap,
    fmt,
    io::{BufRead as _, BufReader},
    net::{SocketAddr, TcpStream},
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicUsize, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use drumline_error::spent;
use serde::{Deserialize, de::DeserializeOwned};
use serde_json::{Value, json};
use ureq::{Agent, Body, http::Response};

use super::{
    api::{Answer, Notice, Token},
    cluster::{CONNECT_PATIENCE, Cluster, User},
    failure::{Failure, knows_no_users, not_etcd, of_answer, of_exchange},
};
use crate::{Error, Result, net::site::resolve, text::escaped};

/// How long a server may take to answer before the next one is asked. It doubles with every round, because the
/// disk of a server can be slow.
const ANSWER_PATIENCE: Duration = Duration::from_secs(2);
const ANSWER_PATIENCE_MAX: Duration = Duration::from_secs(16);

/// The pauses after all servers have failed.
const PAUSE: Duration = Duration::from_millis(20);
const PAUSE_MAX: Duration = Duration::from_millis(500);

/// How long no server may answer before the log says so.
const WARN_AFTER: Duration = Duration::from_secs(3);

/// The longest answer: 32 MiB of values in base64, and their keys.
const ANSWER_BYTES_MAX: u64 = 64 << 20;

/// The time until `deadline`, but no less than a moment: a time limit of zero would be none.
fn left_until(deadline: Instant) -> Duration {
    deadline.saturating_duration_since(Instant::now()).max(Duration::from_millis(1))
}

/// The servers of a cluster.
pub(super) struct Servers {
    /// The store, for messages.
    name: String,
    urls: Vec<String>,
    agent: Agent,
    user: Option<User>,
    /// What a login gave. Empty: no server asks.
    token: Mutex<Option<Arc<str>>>,
    /// The server that answered last.
    present: AtomicUsize,
}

impl Servers {
    pub(super) fn new(cluster: &Cluster, name: String) -> Result<Servers> {
        let (urls, agent) = (cluster.urls()?, cluster.agent()?);
        let (user, token, present) = (cluster.user.clone(), Mutex::default(), AtomicUsize::new(0));
        Ok(Servers { name, urls, agent, user, token, present })
    }

    pub(super) fn name(&self) -> &str {
        &self.name
    }

    /// Sends `request` to one server after the other until one answers, at most until `deadline`. It may arrive
    /// more than once.
    pub(super) fn call<T: DeserializeOwned>(
        &self,
        operation: &str,
        path: &str,
        request: &Value,
        deadline: Instant,
    ) -> Result<Answer<T>> {
        let (start, request) = (Instant::now(), request.to_string());
        let mut failures = BTreeMap::new();
        let (mut patience, mut pause, mut has_warned) = (ANSWER_PATIENCE, PAUSE, false);
        loop {
            let first = self.present.load(Ordering::Relaxed);
            for server in (0..self.urls.len()).map(|step| (first + step) % self.urls.len()) {
                if let Some(Failure::Server(_)) = failures.get(&server) {
                    continue;
                }
                let limit = patience.min(left_until(deadline));
                match self.attempt(&self.urls[server], path, &request, limit) {
                    Ok(answer) => {
                        self.present.store(server, Ordering::Relaxed);
                        return Ok(answer);
                    }
                    Err(failure @ Failure::Cluster(_)) => {
                        let failures = BTreeMap::from([(server, failure)]);
                        return Err(self.failed(operation, &failures, None));
                    }
                    // An attempt that the deadline has cut short tells less than one before it.
                    Err(failure) if Instant::now() >= deadline => {
                        failures.entry(server).or_insert(failure);
                    }
                    Err(failure) => {
                        failures.insert(server, failure);
                    }
                }
            }
            if failures.values().all(|failure| matches!(failure, Failure::Server(_))) {
                return Err(self.failed(operation, &failures, None));
            }
            if Instant::now() >= deadline {
                return Err(self.failed(operation, &failures, Some(start.elapsed())));
            }
            if !has_warned && start.elapsed() > WARN_AFTER {
                has_warned = true;
                let error = self.failed(operation, &failures, Some(start.elapsed()));
                tracing::warn!(%error, "no server of etcd answers; trying on");
            }
            thread::sleep(pause.min(left_until(deadline)));
            pause = (pause * 2).min(PAUSE_MAX);
            patience = (patience * 2).min(ANSWER_PATIENCE_MAX);
        }
    }

    fn failed(
        &self,
        operation: &str,
        failures: &BTreeMap<usize, Failure>,
        tried: Option<Duration>,
    ) -> Error {
        let each =
            failures.iter().map(|(&server, failure)| format!("{}: {failure}", self.urls[server]));
        let each = each.collect::<Vec<_>>().join("; ");
        let tried = tried.map_or_else(String::new, |time| format!("tried for {}: ", spent(time)));
        self.error(operation, format!("{tried}{each}"))
    }

    /// An error of this store.
    pub(super) fn error(&self, operation: &str, problem: String) -> Error {
        Error::store(&self.name, &escaped(operation), problem)
    }

    fn attempt<T: DeserializeOwned>(
        &self,
        url: &str,
        path: &str,
        request: &str,
        limit: Duration,
    ) -> Result<Answer<T>, Failure> {
        let until = Instant::now() + limit;
        let mut has_logged_in = false;
        loop {
            let token = match self.token() {
                Some(token) => token,
                None => {
                    has_logged_in = true;
                    self.log_in(url, until)?
                }
            };
            let outcome = self.exchange(url, path, request, &token, until);
            match (outcome, &self.user) {
                (Err(Failure::Login(why)), None) => {
                    return Err(Failure::Cluster(format!(
                        "it asks for a user ({why}); set DRUMLINE_ETCD_USER and DRUMLINE_ETCD_PASSWORD"
                    )));
                }
                // A login at one server may not have reached the others yet.
                (Err(Failure::Login(why)), Some(_)) if has_logged_in => {
                    self.forget(&token);
                    return Err(Failure::Passing(format!(
                        "it does not accept a fresh login ({why})"
                    )));
                }
                (Err(Failure::Login(_)), Some(_)) => self.forget(&token),
                (outcome, _) => return outcome,
            }
        }
    }

    /// One request, and the answer to it.
    fn exchange<T: DeserializeOwned>(
        &self,
        url: &str,
        path: &str,
        request: &str,
        token: &str,
        until: Instant,
    ) -> Result<Answer<T>, Failure> {
        let is_secured = url.starts_with("https:");
        let mut response = self.post(url, path, request, token, until)?;
        let status = response.status().as_u16();
        let body = response.body_mut().with_config().limit(ANSWER_BYTES_MAX).read_to_vec();
        let body = body.map_err(|error| of_exchange(&error, is_secured))?;
        if status == 404 {
            return Err(self.without_gateway(url, until));
        }
        if status != 200 {
            return Err(self.with_user(of_answer(status, &String::from_utf8_lossy(&body))));
        }
        serde_json::from_slice(&body)
            .map_err(|error| not_etcd(&format!("it answers what etcd would not ({error})")))
    }

    fn post(
        &self,
        url: &str,
        path: &str,
        request: &str,
        token: &str,
        until: Instant,
    ) -> Result<Response<Body>, Failure> {
        let limit = left_until(until);
        let post = self.agent.post(format!("{url}{path}")).content_type("application/json");
        let post = if token.is_empty() { post } else { post.header("Authorization", token) };
        let post =
            post.config().timeout_global(Some(limit)).timeout_connect(Some(CONNECT_PATIENCE));
        post.build().send(request).map_err(|error| of_exchange(&error, url.starts_with("https:")))
    }

    /// Why a server has no `/v3`: it tells its version.
    fn without_gateway(&self, url: &str, until: Instant) -> Failure {
        #[derive(Deserialize)]
        struct Version {
            etcdserver: String,
        }
        let limit = left_until(until);
        let get = self.agent.get(format!("{url}/version")).config().timeout_global(Some(limit));
        let text = get.build().call().and_then(|mut it| it.body_mut().read_to_string());
        match text.ok().and_then(|text| serde_json::from_str::<Version>(&text).ok()) {
            Some(version) => Failure::Server(format!(
                "it is etcd {}, and does not answer at /v3; etcd 3.4 or newer is needed, without \
                 --enable-grpc-gateway=false",
                escaped(&version.etcdserver)
            )),
            None => not_etcd("it answers HTTP 404"),
        }
    }

    /// Names the user whom a server does not let do something.
    fn with_user(&self, failure: Failure) -> Failure {
        match (failure, &self.user) {
            (Failure::Cluster(why), Some(user)) if why.contains("permission denied") => {
                let name = escaped(&user.name);
                Failure::Cluster(format!(
                    "{why}: user {name} may not read and write the keys of the job; grant it: etcdctl role \
                     grant-permission --prefix=true ROLE readwrite PREFIX"
                ))
            }
            (failure, _) => failure,
        }
    }

    fn held_token(&self) -> MutexGuard<'_, Option<Arc<str>>> {
        self.token.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The token, if no login is needed first.
    fn token(&self) -> Option<Arc<str>> {
        match self.user {
            Some(_) => self.held_token().clone(),
            None => Some(Arc::from("")),
        }
    }

    fn forget(&self, token: &Arc<str>) {
        let mut held = self.held_token();
        // Another thread may have logged in since.
        if held.as_ref() == Some(token) {
            *held = None;
        }
    }

    fn log_in(&self, url: &str, until: Instant) -> Result<Arc<str>, Failure> {
        let Some(user) = &self.user else { return Ok(Arc::from("")) };
        let request = json!({ "name": user.name, "password": user.password.as_str() }).to_string();
        let outcome = self.exchange::<Token>(url, "/v3/auth/authenticate", &request, "", until);
        let token: Arc<str> = match outcome {
            Ok(answer) => Arc::from(answer.body.token),
            Err(failure) if knows_no_users(&failure) => Arc::from(""),
            Err(failure) => return Err(failure),
        };
        *self.held_token() = Some(Arc::clone(&token));
        Ok(token)
    }

    /// Waits until the server tells of a change, at most until `until`. Returns whether it did. A watch that
    /// fails tells of none.
    pub(super) fn watch(&self, requests: &[Value], until: Instant) -> bool {
        let requests: String = requests.iter().map(Value::to_string).collect();
        let token = self.token().unwrap_or_else(|| Arc::from(""));
        let Ok(response) = self.post(self.present_url(), "/v3/watch", &requests, &token, until)
        else {
            return false;
        };
        let body = response.into_body().into_with_config().limit(ANSWER_BYTES_MAX).reader();
        for line in BufReader::new(body).split(b'\n') {
            let notice = line.ok().and_then(|line| serde_json::from_slice::<Notice>(&line).ok());
            match notice {
                Some(notice) if notice.tells_of_a_change() => return true,
                Some(notice) if !notice.is_the_last() => {}
                _ => return false,
            }
        }
        false
    }

    fn present_url(&self) -> &str {
        &self.urls[self.present.load(Ordering::Relaxed)]
    }

    /// The address of the server that answered last, if it can be reached.
    pub(super) fn address(&self) -> Option<SocketAddr> {
        let (_, authority) = self.present_url().split_once("://")?;
        let (host, port) = authority.rsplit_once(':')?;
        let host = host.trim_matches(['[', ']']);
        let until = Instant::now() + CONNECT_PATIENCE;
        let addresses = resolve(host, port.parse().ok()?, until).ok()?;
        addresses
            .into_iter()
            .find(|address| TcpStream::connect_timeout(address, CONNECT_PATIENCE).is_ok())
    }
}

impl fmt::Debug for Servers {
    /// Shows no token.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Servers")
            .field("name", &self.name)
            .field("user", &self.user)
            .finish_non_exhaustive()
    }
}
