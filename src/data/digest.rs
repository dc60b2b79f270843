//! Digest of sample ids in the order they were consumed.
//!
//! Ids are hashed one at a time, so the digest does not depend on how an update was split into micro-batches. Two runs
//! with the same digest consumed the same samples in the same order, up to a collision probability of 2^-64.

use std::{fmt, str::FromStr};

use serde::{Deserialize, Serialize};

use crate::base::random::mix;

/// A 64-bit digest, shown and stored as 16 hexadecimal digits.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(into = "String", try_from = "String")]
pub struct Digest(u64);

impl Digest {
    pub fn add(&mut self, id: u64) {
        // Hash the id before combining it with the state: ids are small and close to each other.
        self.0 = mix(self.0.rotate_left(23) ^ mix(id.wrapping_add(1)));
    }
}

impl Extend<u64> for Digest {
    fn extend<I: IntoIterator<Item = u64>>(&mut self, ids: I) {
        ids.into_iter().for_each(|id| self.add(id));
    }
}

impl fmt::Display for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:016x}", self.0)
    }
}

#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("`{0}` is not a digest of 16 hexadecimal digits")]
pub struct ParseDigestError(String);

impl FromStr for Digest {
    type Err = ParseDigestError;

    fn from_str(text: &str) -> Result<Self, ParseDigestError> {
        let wrong = || ParseDigestError(text.to_owned());
        if text.len() != 16 || !text.bytes().all(|b| b.is_ascii_hexdigit()) {
            return Err(wrong());
        }
        u64::from_str_radix(text, 16).map(Digest).map_err(|_| wrong())
    }
}

impl From<Digest> for String {
    fn from(digest: Digest) -> String {
        digest.to_string()
    }
}

impl TryFrom<String> for Digest {
    type Error = ParseDigestError;

    fn try_from(text: String) -> Result<Self, ParseDigestError> {
        text.parse()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn digest_of(ids: &[u64]) -> Digest {
        let mut digest = Digest::default();
        digest.extend(ids.iter().copied());
        digest
    }

    #[test]
    fn sees_order_loss_and_repetition_but_not_the_split() {
        let whole = digest_of(&[0, 1, 2, 3]);
        let mut parts = digest_of(&[0, 1]);
        parts.extend([2]);
        parts.extend([3]);
        assert_eq!(parts, whole);
        for other in [&[1, 0, 2, 3][..], &[0, 1, 2], &[0, 0, 1, 2, 3], &[0, 1, 2, 3, 3], &[], &[0]] {
            assert_ne!(digest_of(other), whole, "{other:?}");
        }
        assert_ne!(digest_of(&[0]), digest_of(&[]));
        assert_ne!(digest_of(&[0, 0]), digest_of(&[0]));
    }

    #[test]
    fn survives_serialisation_and_refuses_other_text() {
        let digest = digest_of(&[7, 9]);
        let text = serde_json::to_string(&digest).unwrap();
        assert_eq!(text, format!("\"{digest}\""));
        assert_eq!(serde_json::from_str::<Digest>(&text).unwrap(), digest);
        for wrong in ["", "12", "+123456789abcdef", "zz3456789abcdef0"] {
            assert!(wrong.parse::<Digest>().is_err(), "{wrong}");
        }
    }
}
