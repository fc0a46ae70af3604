//! Questions to the store.

use std::time::Duration;

use super::steps::{Answer, Ask, Desk, Outside};
use crate::recorder::{Category, Open, Recorder, What};

impl<W: Outside> Desk<W> {
    pub(super) async fn set(&self, key: &str, value: &[u8]) -> Result<(), W::Error> {
        self.ask(Ask::Set(key.to_owned(), value.to_vec())).await.map(drop)
    }

    pub(super) async fn set_all(&self, pairs: Vec<(String, Vec<u8>)>) -> Result<(), W::Error> {
        self.ask(Ask::SetAll(pairs)).await.map(drop)
    }

    pub(super) async fn get(&self, key: &str) -> Result<Vec<u8>, W::Error> {
        self.ask(Ask::Get(key.to_owned())).await.map(word)
    }

    pub(super) async fn get_all(&self, keys: Vec<String>) -> Result<Vec<Vec<u8>>, W::Error> {
        self.ask(Ask::GetAll(keys)).await.map(words)
    }

    pub(super) async fn compare_set(
        &self,
        key: &str,
        expected: &[u8],
        desired: &[u8],
    ) -> Result<Vec<u8>, W::Error> {
        let (key, expected, desired) = (key.to_owned(), expected.to_vec(), desired.to_vec());
        self.ask(Ask::CompareSet { key, expected, desired }).await.map(word)
    }

    pub(super) async fn add(&self, key: &str, amount: i64) -> Result<i64, W::Error> {
        Ok(number(&self.ask(Ask::Add(key.to_owned(), amount)).await?))
    }

    pub(super) async fn check(&self, key: &str) -> Result<bool, W::Error> {
        Ok(number(&self.ask(Ask::Check(key.to_owned())).await?) != 0)
    }

    /// Waits for `keys`. Returns the keys that were missing when the time was over.
    pub(super) async fn wait(
        &self,
        keys: Vec<String>,
        limit: Duration,
    ) -> Result<Vec<String>, W::Error> {
        match self.ask(Ask::Wait(keys, limit)).await? {
            Answer::Missing(keys) => Ok(keys),
            _ => Ok(Vec::new()),
        }
    }

    /// Deletes keys, up to the first that cannot be deleted.
    pub(super) async fn take_back(&self, keys: impl IntoIterator<Item = String>) {
        for key in keys {
            if let Err(error) = self.ask(Ask::Delete(key.clone())).await {
                // The store has gone, and the key went with it.
                tracing::debug!(key, %error, "cannot take a key back");
                return;
            }
        }
    }
}

/// The value of an answer.
pub(super) fn word<S>(answer: Answer<S>) -> Vec<u8> {
    words(answer).pop().unwrap_or_default()
}

/// The values of an answer.
fn words<S>(answer: Answer<S>) -> Vec<Vec<u8>> {
    match answer {
        Answer::Words(words) => words,
        _ => unreachable!("the answer is not of the question's kind"),
    }
}

fn number<S>(answer: &Answer<S>) -> i64 {
    match answer {
        Answer::Number(number) => *number,
        _ => unreachable!("the answer is not of the question's kind"),
    }
}

/// The record of a wait for the store.
pub(super) fn record(recorder: &Recorder, keys: &[String]) -> Open {
    recorder.begin(|| What {
        category: Category::Store,
        name: "wait",
        key: Some(keys.join(", ").into()),
        ..What::default()
    })
}
