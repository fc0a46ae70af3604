//! Values that only hosts of the job can have written.

use std::time::Duration;

use drumline::{Result, auth::Secret, store::Store};

/// A store whose values are signed with the job's secret. Everybody may be able to write to a file or to etcd. A value
/// with a wrong signature counts as absent, and the log says so.
///
/// Counters are not signed: who changes them can only make hosts begin again.
#[derive(Debug)]
pub(super) struct Signed {
    store: Box<dyn Store>,
    secret: Secret,
    prefix: String,
    /// What stands between the prefix and a key.
    part: String,
}

impl Signed {
    /// All keys get `prefix` in front.
    pub(super) fn over(store: Box<dyn Store>, secret: Secret, prefix: String) -> Signed {
        store.set_timeout(CALL_MAX);
        Signed { store, secret, prefix, part: String::new() }
    }

    /// From now on all keys get `part` between the prefix and themselves.
    pub(super) fn enter(&mut self, part: String) {
        self.part = part;
    }

    /// Removes a key if it is there.
    pub(super) fn remove(&self, key: &str) -> Result<()> {
        self.store.delete_key(&self.full(key)).map(drop)
    }

    pub(super) fn add(&self, key: &str, amount: i64) -> Result<i64> {
        self.store.add(&self.full(key), amount)
    }

    pub(super) fn set(&self, key: &str, text: &[u8]) -> Result<()> {
        let key = self.full(key);
        self.store.set(&key, &self.seal(&key, text))
    }

    /// Replaces the text under `key` if it is `expected`. Returns whether it was.
    pub(super) fn replace(&self, key: &str, expected: Option<&[u8]>, text: &[u8]) -> Result<bool> {
        let key = self.full(key);
        let expected = expected.map_or_else(Vec::new, |text| self.seal(&key, text));
        let desired = self.seal(&key, text);
        Ok(self.store.compare_set(&key, &expected, &desired)? == desired)
    }

    /// The texts under `keys`; `None` for those that are not there.
    pub(super) fn read(&self, keys: &[String]) -> Result<Vec<Option<Vec<u8>>>> {
        let keys: Vec<String> = keys.iter().map(|key| self.full(key)).collect();
        let names: Vec<&str> = keys.iter().map(String::as_str).collect();
        let values = match keys.len() {
            0 => return Ok(Vec::new()),
            1 => vec![self.one(names[0])?],
            _ if self.store.check(&names)? => {
                self.store.multi_get(&names)?.into_iter().map(Some).collect()
            }
            _ => names.iter().map(|name| self.one(name)).collect::<Result<_>>()?,
        };
        let opened = keys.iter().zip(values).map(|(key, value)| self.open(key, &value?));
        Ok(opened.collect())
    }

    fn one(&self, key: &str) -> Result<Option<Vec<u8>>> {
        match self.store.check(&[key])? {
            true => self.store.get(key).map(Some),
            false => Ok(None),
        }
    }

    fn full(&self, key: &str) -> String {
        format!("{}{}{key}", self.prefix, self.part)
    }

    fn seal(&self, key: &str, text: &[u8]) -> Vec<u8> {
        let mut sealed = self.secret.sign(key, text).to_vec();
        sealed.extend_from_slice(text);
        sealed
    }

    fn open(&self, key: &str, value: &[u8]) -> Option<Vec<u8>> {
        let (tag, text) = value.split_at_checked(Secret::TAG_BYTES)?;
        let is_ours = self.secret.has_signed(key, text, tag);
        if !is_ours {
            tracing::warn!(
                key,
                "a value where the hosts meet is not signed with the secret of this job: it is ignored \
                 (do all hosts have the same DRUMLINE_SECRET or DRUMLINE_SECRET_FILE?)"
            );
        }
        is_ours.then(|| text.to_vec())
    }
}

/// How long a call to the store may take.
const CALL_MAX: Duration = Duration::from_secs(2);

#[cfg(test)]
mod tests {
    use drumline::store::HashStore;

    use super::*;

    #[test]
    fn what_another_secret_or_nobody_has_signed_is_absent() {
        let store = HashStore::new();
        let with = |secret: &Secret| {
            Signed::over(store.try_clone().unwrap(), secret.clone(), "job/".into())
        };
        let (secret, other) = (Secret::random().unwrap(), Secret::random().unwrap());
        let (ours, theirs) = (with(&secret), with(&other));
        ours.set("a", b"text").unwrap();
        theirs.set("b", b"text").unwrap();
        store.set("job/c", b"text").unwrap();
        let keys = ["a", "b", "c", "d"].map(str::to_owned);
        assert_eq!(ours.read(&keys).unwrap(), [Some(b"text".to_vec()), None, None, None]);
        // Not the text of another key, either.
        store.set("job/d", &store.get("job/a").unwrap()).unwrap();
        assert_eq!(ours.read(&keys[3..]).unwrap(), [None]);
    }

    #[test]
    fn only_one_of_two_replaces_a_text() {
        let store = HashStore::new();
        let secret = Secret::random().unwrap();
        let signed = Signed::over(store.try_clone().unwrap(), secret, String::new());
        assert!(signed.replace("plan", None, b"1").unwrap());
        assert!(!signed.replace("plan", None, b"2").unwrap());
        assert!(signed.replace("plan", Some(b"1"), b"2").unwrap());
        assert!(!signed.replace("plan", Some(b"1"), b"3").unwrap());
        assert_eq!(signed.read(&["plan".to_owned()]).unwrap(), [Some(b"2".to_vec())]);
    }
}
