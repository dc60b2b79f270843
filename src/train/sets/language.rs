//! Sets of text in files.

use std::sync::Arc;

use super::{Failure, Sets};
use crate::data::Opening;
use crate::data::text::{Corpus, Placement, Windows};
use crate::job;

pub(super) fn text(s: &job::Text, context: usize, opening: &Opening) -> Result<Sets, Failure> {
    let corpus = Arc::new(Corpus::open(&s.files, opening.max_bytes)?);
    let (train, valid) = corpus.split(s.valid_share);
    let placement = match s.windows {
        job::Windows::Fixed => Placement::Fixed,
        job::Windows::Random => Placement::Random,
    };
    let train = Windows::new(corpus.clone(), train, context, placement)?;
    Ok(Sets::of(train, Windows::new(corpus, valid, context, Placement::Fixed)?))
}
