//! Requests and answers of etcd's API v3, as its gateway writes them: JSON, with bytes in base64, 64-bit numbers
//! as text, and without fields that are 0, false or empty.

use base64::{Engine as _, engine::general_purpose::STANDARD};
use serde::{Deserialize, Deserializer, de::Error as _};
use serde_json::{Value, json};

/// Keys from `begin` on, to `end` (exclusive). `None`: `begin` alone.
#[derive(Clone, Debug)]
pub(super) struct Span {
    begin: Vec<u8>,
    end: Option<Vec<u8>>,
}

impl Span {
    /// One key.
    pub(super) fn key(key: impl Into<Vec<u8>>) -> Span {
        Span { begin: key.into(), end: None }
    }

    /// All keys under `folder`, which ends with a `/`.
    pub(super) fn folder(folder: impl Into<Vec<u8>>) -> Span {
        let begin = folder.into();
        let mut end = begin.clone();
        // The character behind the `/`.
        if let Some(last) = end.last_mut() {
            *last += 1;
        }
        Span { begin, end: Some(end) }
    }

    /// The fields of any request, with `more`.
    fn with(&self, mut more: Value) -> Value {
        more["key"] = bytes(&self.begin);
        if let Some(end) = &self.end {
            more["range_end"] = bytes(end);
        }
        more
    }

    pub(super) fn range(&self) -> Value {
        self.with(json!({}))
    }

    pub(super) fn range_at(&self, revision: i64) -> Value {
        self.with(json!({ "revision": revision.to_string() }))
    }

    pub(super) fn count(&self) -> Value {
        self.with(json!({ "count_only": true }))
    }

    pub(super) fn names(&self) -> Value {
        self.with(json!({ "keys_only": true }))
    }

    /// The key that was made first.
    pub(super) fn oldest(&self) -> Value {
        self.with(json!({ "limit": "1", "sort_target": "CREATE", "sort_order": "ASCEND" }))
    }

    pub(super) fn delete(&self) -> Value {
        json!({ "request_delete_range": self.with(json!({})) })
    }

    /// Holds if no key was changed after `revision`.
    pub(super) fn is_unchanged_since(&self, revision: i64) -> Value {
        self.with(json!({ "target": "MOD", "result": "LESS", "mod_revision": (revision + 1).to_string() }))
    }

    /// Holds if the key was changed last at `revision`; 0: if it is absent.
    pub(super) fn was_changed_at(&self, revision: i64) -> Value {
        self.with(
            json!({ "target": "MOD", "result": "EQUAL", "mod_revision": revision.to_string() }),
        )
    }

    /// A request to be told of changes from `revision` on.
    pub(super) fn watch(&self, revision: i64) -> Value {
        json!({ "create_request": self.with(json!({ "start_revision": revision.to_string() })) })
    }
}

pub(super) fn put(key: &[u8], value: &[u8]) -> Value {
    json!({ "request_put": { "key": bytes(key), "value": bytes(value) } })
}

/// A range as a part of a transaction.
pub(super) fn look(range: &Value) -> Value {
    json!({ "request_range": range })
}

pub(super) fn txn(compare: &[Value], success: &[Value], failure: &[Value]) -> Value {
    json!({ "compare": compare, "success": success, "failure": failure })
}

/// A transaction as a part of another one.
pub(super) fn inner(txn: &Value) -> Value {
    json!({ "request_txn": txn })
}

fn bytes(bytes: &[u8]) -> Value {
    STANDARD.encode(bytes).into()
}

/// What an answer of etcd begins with. Other services have none.
#[derive(Debug, Deserialize)]
pub(super) struct Header {
    #[serde(deserialize_with = "number")]
    pub(super) revision: i64,
}

#[derive(Debug, Deserialize)]
pub(super) struct Answer<T> {
    pub(super) header: Header,
    #[serde(flatten)]
    pub(super) body: T,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct Found {
    pub(super) kvs: Vec<Item>,
    #[serde(deserialize_with = "number")]
    pub(super) count: i64,
}

impl Found {
    pub(super) fn first(self) -> Option<Item> {
        self.kvs.into_iter().next()
    }
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct Item {
    #[serde(deserialize_with = "base64")]
    pub(super) key: Vec<u8>,
    #[serde(deserialize_with = "base64")]
    pub(super) value: Vec<u8>,
    #[serde(deserialize_with = "number")]
    pub(super) mod_revision: i64,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct Txn {
    pub(super) succeeded: bool,
    responses: Vec<Part>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct Part {
    response_range: Option<Found>,
    response_txn: Option<Txn>,
}

impl Txn {
    /// What its ranges found, in their order.
    pub(super) fn found(self) -> impl Iterator<Item = Found> {
        self.responses.into_iter().filter_map(|part| part.response_range)
    }

    /// The transaction inside.
    pub(super) fn inner(self) -> Option<Txn> {
        self.responses.into_iter().find_map(|part| part.response_txn)
    }
}

/// A line of a watch.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct Notice {
    result: NoticeResult,
    error: Option<Value>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct NoticeResult {
    canceled: bool,
    events: Vec<Value>,
}

impl Notice {
    /// Whether something has changed.
    pub(super) fn tells_of_a_change(&self) -> bool {
        !self.result.events.is_empty()
    }

    /// Whether no other line will come.
    pub(super) fn is_the_last(&self) -> bool {
        self.result.canceled || self.error.is_some()
    }
}

#[derive(Debug, Deserialize)]
pub(super) struct Token {
    pub(super) token: String,
}

/// A refusal. Servers before 3.6 have both texts.
#[derive(Debug, Deserialize)]
pub(super) struct Refusal {
    pub(super) code: i64,
    message: Option<String>,
    error: Option<String>,
}

impl Refusal {
    pub(super) fn text(self) -> String {
        self.message.or(self.error).unwrap_or_default()
    }
}

fn number<'d, D: Deserializer<'d>>(from: D) -> Result<i64, D::Error> {
    #[derive(Deserialize)]
    #[serde(untagged)]
    enum Either {
        Number(i64),
        Text(String),
    }
    match Either::deserialize(from)? {
        Either::Number(number) => Ok(number),
        Either::Text(text) => text.parse().map_err(D::Error::custom),
    }
}

fn base64<'d, D: Deserializer<'d>>(from: D) -> Result<Vec<u8>, D::Error> {
    STANDARD.decode(String::deserialize(from)?).map_err(D::Error::custom)
}
