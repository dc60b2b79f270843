//! Datasets as they are published, read as other tools read them.

use super::*;
use crate::published_dataset;

fn sklearn(name: &str) -> Option<PathBuf> {
    published_dataset("tabular/sklearn").map(|folder| folder.join(name))
}

fn one(path: &Path, dialect: Dialect, settings: &TableSettings) -> (DatasetRef, DatasetRef) {
    let fixture = TableFixture::new();
    fixture
        .open(&[path.to_owned()], &[], TableFileFormat::Csv(dialect.into()), settings)
        .unwrap_or_else(|e| panic!("{e}"))
}

#[test]
fn the_small_sets_of_sklearn_as_published() {
    let headless = Dialect { header: false, ..Dialect::default() };
    let counted = Dialect { skip_lines: 1, ..headless };
    for (name, rows, inputs, of) in
        [("iris.csv", 150, 4, 3), ("wine_data.csv", 178, 13, 3), ("breast_cancer.csv", 569, 30, 2)]
    {
        let Some(path) = sklearn(name) else { return };
        let settings = TableSettings { standardise: true, ..target(&[&inputs.to_string()]) };
        let (train, valid) = one(&path, counted, &settings);
        assert_eq!(train.len() + valid.len(), rows, "{name}");
        assert_eq!((shape(&train), classes(&train).len()), (inputs, of), "{name}");
    }
    let Some(path) = sklearn("digits.csv.gz") else { return };
    let (train, valid) = one(&path, headless, &target(&["64"]));
    assert_eq!((train.len() + valid.len(), shape(&train), classes(&train).len()), (1797, 64, 10));
    let Some(path) = sklearn("diabetes_data_raw.csv.gz") else { return };
    let spaced = Dialect { delimiter: FieldDelimiter::Whitespace, ..headless };
    let (train, valid) = one(&path, spaced, &target(&["9"]));
    assert_eq!(
        (train.len() + valid.len(), train.features().target.clone()),
        (442, TargetSpec::Values { len: 1 })
    );
}

#[test]
fn california_housing_as_published() {
    let Some(folder) = published_dataset("tabular/california-housing") else { return };
    let settings = TableSettings {
        on_missing: MissingPolicy::Mean,
        standardise: true,
        ..target(&["median_house_value"])
    };
    let (train, valid) = one(&folder.join("housing.csv"), Dialect::default(), &settings);
    assert_eq!((train.len(), valid.len()), (15_480, 5_160));
    // Eight numbers, and five categories of ocean proximity.
    assert_eq!((shape(&train), train.features().target.clone()), (13, TargetSpec::Values { len: 1 }));
    let about =
        train.describe().into_iter().map(|(name, value)| format!("{name}: {value}")).collect::<Vec<_>>();
    assert!(about.iter().any(|line| line.contains("ocean_proximity: category of 5 values")), "{about:?}");
    assert!(
        about.iter().any(|line| line.contains("total_bedrooms: number") && line.contains("missing")),
        "{about:?}"
    );
    let strict = TableSettings { on_missing: MissingPolicy::Error, ..settings };
    let fixture = TableFixture::new();
    let error = fixture.open(
        &[folder.join("housing.csv")],
        &[],
        TableFileFormat::Csv(Dialect::default().into()),
        &strict,
    );
    let error = error.err().unwrap().to_string();
    assert!(
        error.contains("line 292, column `total_bedrooms`") || error.contains("column `total_bedrooms`"),
        "{error}"
    );
}

#[test]
fn adult_as_published() {
    let Some(folder) = published_dataset("tabular/adult") else { return };
    let fixture = TableFixture::new();
    let settings = TableSettings {
        on_missing: MissingPolicy::Mean,
        trim: ".".into(),
        standardise: true,
        ..target(&["Y"])
    };
    let (train, valid) = fixture
        .open(
            &[folder.join("adult.data")],
            &[folder.join("adult.test")],
            TableFileFormat::Csv(Dialect::default().into()),
            &settings,
        )
        .unwrap();
    assert_eq!((train.len(), valid.len()), (32_561, 16_281));
    assert_eq!(classes(&train), ["<=50K", ">50K"]);
    // Six numbers, and the one-hot values of eight columns, three of which have missing values.
    assert_eq!(shape(&train), 6 + 8 + 16 + 7 + 14 + 6 + 5 + 2 + 41 + 3);
    let over: f32 = (0..valid.len()).map(|i| read(&valid, i).unwrap().1[0]).sum();
    assert_eq!(over, 3846.0);
    let balance = train.class_counts().unwrap();
    assert_eq!(balance, [24_720, 7_841]);
    let embedded = TableSettings { embed: true, ..settings.clone() };
    let (train, _) = fixture
        .open(
            &[folder.join("adult.data")],
            &[folder.join("adult.test")],
            TableFileFormat::Csv(Dialect::default().into()),
            &embedded,
        )
        .unwrap();
    let categories = vec![9, 16, 7, 15, 6, 5, 2, 42];
    assert_eq!(train.features().input, InputSpec::Tabular { num_numeric: 6, cardinalities: categories });
    let dotted = TableSettings { trim: String::new(), ..settings };
    let (_, valid) = fixture
        .open(
            &[folder.join("adult.data")],
            &[folder.join("adult.test")],
            TableFileFormat::Csv(Dialect::default().into()),
            &dotted,
        )
        .unwrap();
    assert!(read(&valid, 0).unwrap_err().to_string().contains("`<=50K.` is not one of the 2 classes"));
}
